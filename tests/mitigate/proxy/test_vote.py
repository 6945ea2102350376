"""Policy vote: weak phases are outvoted, the client is told how many agreed, and what cannot be voted on says so."""

from __future__ import annotations

import json

import openai
import pytest

RIGHT, WRONG = "The code is 42.", "The code is 7."


def content(reply) -> str:
    return reply.json()["choices"][0]["message"]["content"]


def test_a_weak_phase_is_outvoted(stub, proxy, http, ask):
    server = proxy(policy="vote", shifts=4)
    weak = " ." * 3 + "What is the code?"  # as it is, this request stands at the weak phase
    assert content(http.post(f"{stub.url}/chat/completions", json=ask(text=weak))) == WRONG
    reply = http.post(f"{server.url}/chat/completions", json=ask(text=weak))
    assert content(reply) == RIGHT
    assert reply.headers["x-isophase-agreement"] == "3/4"
    assert reply.headers["x-isophase-shift"] == "1"
    assert (reply.headers["x-isophase-asked"], reply.headers["x-isophase-rule"]) == ("4", "majority")
    # 20 + shift tokens read and 5 written at each shift; this request holds three neutral tokens of its own.
    assert reply.headers["x-isophase-tokens"] == f"{4 * 23 + 0 + 1 + 2 + 3}+20"


def test_equal_answers_settle_a_vote_before_all_shifts_are_asked(stub, proxy, http, ask):
    reply = http.post(f"{proxy(shifts=4).url}/chat/completions", json=ask())
    # Where two answers with the unshifted one among them come first, not even the third can change the winner.
    assert reply.headers["x-isophase-agreement"] in ("2/2", "3/3")
    assert reply.headers["x-isophase-asked"] == "3"
    assert stub.requests <= 3


def test_neutral_tokens_stand_behind_the_system_prompt(stub, proxy, http, ask):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "The code?"},
    ]
    for place, at in (("first-user", 1), ("last-user", 3), ("system", 0)):
        stub.bodies.clear()
        http.post(f"{proxy(shifts=3, place=place).url}/chat/completions", json=ask(messages=messages))
        assert stub.bodies
        for body in stub.bodies:
            others = [m for n, m in enumerate(body["messages"]) if n != at]
            assert others == [m for n, m in enumerate(messages) if n != at]
        shifted = [json.dumps(body["messages"][at]) for body in stub.bodies]
        assert sorted(text.count(" .") for text in shifted) == [0, 1]
    reply = http.post(f"{proxy(shifts=3).url}/completions", json={"model": "weak", "prompt": "The code?"})
    assert {body.get("prompt") for body in stub.bodies[-2:]} == {"The code?", " .The code?"}
    assert reply.json()["choices"][0]["text"] == RIGHT


def test_the_unshifted_request_goes_out_as_it_came_in(stub, proxy, http, ask):
    raw = json.dumps(ask(), indent=4).encode()
    http.post(f"{proxy(shifts=2).url}/chat/completions", content=raw)
    assert raw in stub.raw_bodies


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_stream_is_answered_by_one_vote(stub, proxy, http, ask, route):
    weak = " ." * 3 + "What is the code?"
    body = ask(text=weak, prompt=weak, stream=True, stream_options={"include_usage": True})
    reply = http.post(f"{proxy(shifts=4).url}/{route}", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-isophase-agreement"] == "3/4"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
    last = json.loads(events[-3].removeprefix("data: "))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    assert not any("stream" in sent for sent in stub.bodies)


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client(stub, proxy, stream):
    with openai.OpenAI(base_url=proxy(shifts=4).url, api_key="sk-none", max_retries=0) as client:
        messages = [{"role": "user", "content": " . . .The code?"}]
        asked = {"model": "weak", "messages": messages, "stop": ["\n"], "logprobs": True}
        if stream:
            with client.chat.completions.with_streaming_response.create(**asked, stream=True) as raw:
                assert raw.headers["x-isophase-agreement"] == "3/4"
                events = list(raw.parse())
            assert "".join(event.choices[0].delta.content or "" for event in events) == RIGHT
            assert events[0].choices[0].delta.role == "assistant"
            assert events[-1].choices[0].finish_reason == "stop"
            assert events[1].choices[0].logprobs.content[0].logprob == -0.1
        else:
            raw = client.chat.completions.with_raw_response.create(**asked)
            assert raw.headers["x-isophase-agreement"] == "3/4"
            assert raw.parse().choices[0].message.content == RIGHT
    assert all(body["stop"] == ["\n"] for body in stub.bodies)


def test_headers_of_a_request_choose(stub, proxy, http, ask):
    url = f"{proxy(policy='off', most_shifts=8, strides_tokens=(8,)).url}/chat/completions"
    assert not any(name.startswith("x-isophase") for name in http.post(url, json=ask()).headers)
    reply = http.post(url, json=ask("weak-long"), headers={"x-isophase-policy": "vote", "x-isophase-shifts": "8"})
    agreeing, answered = map(int, reply.headers["x-isophase-agreement"].split("/"))
    assert (content(reply), answered - agreeing) == (WRONG, 1)  # all but the unshifted one
    assert (agreeing >= 5, reply.headers["x-isophase-asked"]) == (True, "8")
    assert not any(name.startswith("x-isophase") for names in stub.headers for name, _ in names)
    url = f"{proxy().url}/chat/completions"
    assert "x-isophase-agreement" not in http.post(url, json=ask(), headers={"x-isophase-policy": "off"}).headers
    for name, value in {"policy": "on", "shifts": "17", "rule": "loudest"}.items():
        for wrong in (value, "", "0", "-1", "٣".encode()):
            reply = http.post(url, json=ask(), headers={f"x-isophase-{name}": wrong})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad_header")
    twice = http.post(url, json=ask(), headers=[("x-isophase-shifts", "2"), ("x-isophase-shifts", "3")])
    assert twice.status_code == 400


def test_confidence_asks_for_log_probabilities_and_takes_them_out_again(stub, proxy, http, ask):
    server = proxy(shifts=4, rule="confidence")
    reply = http.post(f"{server.url}/chat/completions", json=ask(text=" . . .The code?"))
    assert all(body["logprobs"] for body in stub.bodies)
    assert (content(reply), reply.headers["x-isophase-rule"]) == (RIGHT, "confidence")
    assert reply.json()["choices"][0]["logprobs"] is None
    kept = http.post(f"{server.url}/chat/completions", json=ask(logprobs=True)).json()
    assert kept["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.1
    reply = http.post(f"{server.url}/completions", json={"model": "weak", "prompt": "The code?"})
    assert reply.json()["choices"][0]["text"] == RIGHT


def test_json_answers_are_compared_as_values(stub, proxy, http, ask):
    reply = http.post(
        f"{proxy(shifts=4).url}/chat/completions", json=ask(text=" . . .", response_format={"type": "json_object"})
    )
    assert json.loads(content(reply)) == {"code": 42}
    assert reply.headers["x-isophase-agreement"] == "3/4"  # in spite of other white space at every shift


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 2}, "more than one answer"),
        ({"tools": [{"type": "function"}]}, "tool calls"),
        ({"tool_choice": "auto"}, "tool calls"),
        ({"modalities": ["text", "audio"]}, "only text"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": 3}]}, "no messages"),
        ({"max_tokens": 3_000_000}, "above the limit of 2000000"),
    ],
)
def test_what_cannot_be_voted_on_is_passed_on_and_says_so(stub, proxy, http, ask, more, reason):
    body = ask("echo", **more)
    through = http.post(f"{proxy().url}/chat/completions", json=body)
    straight = http.post(f"{stub.url}/chat/completions", json=body)
    assert (through.status_code, through.content) == (straight.status_code, straight.content)
    assert through.headers["x-isophase-agreement"].startswith("unvoted; ")
    assert reason in through.headers["x-isophase-agreement"]
    assert stub.raw_bodies[0] == stub.raw_bodies[1]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": NaN}', b"[" * 100_000, b"\xff\xfe", b'{"model":"echo"}'])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_bodies_that_are_no_request_are_the_servers_to_refuse(stub, proxy, http, raw, route):
    through = http.post(f"{proxy().url}/{route}", content=raw)
    assert (through.status_code, stub.raw_bodies) == (400, [raw])
    assert through.headers["x-isophase-agreement"].startswith("unvoted; ")


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2, 3], [[1], [2]]])
def test_prompts_of_ids_and_lists_are_not_shifted(stub, proxy, http, prompt):
    through = http.post(f"{proxy().url}/completions", json={"model": "echo", "prompt": prompt})
    assert through.headers["x-isophase-agreement"] == "unvoted; only a prompt that is one text can be shifted"


def test_a_tokenizer_makes_shifts_exact(stub, proxy, http, ask, words_folder):
    stub.unit = "? "
    url = f"{proxy(shifts=4, tokenizer=str(words_folder), unit='? ').url}/chat/completions"
    reply = http.post(url, json=ask(text="? ? ? What"))
    assert (content(reply), reply.headers["x-isophase-agreement"]) == (RIGHT, "3/4")
