"""What a server is asked, in every dialect, and what its replies mean. Real sockets, a planted model."""

from __future__ import annotations

import math

import pytest
from fake_server import TOKENIZER, FakeServer

from isophase.errors import IsophaseError
from isophase.probes import ProbeSettings, build_probe
from isophase.targets import ServerOptions, open_target
from isophase.targets.server.connect import UnreachableError
from isophase.targets.server.target import ServerTarget

KINDS = ["vllm", "sglang", "llamacpp", "openai", "openai-text", "chat"]
IDS = ["vllm", "sglang", "llamacpp", "openai"]


@pytest.fixture
def target(words_folder):
    def build(server, **options):
        return ServerTarget(server.spec, tokenizer=str(words_folder), **options)

    return build


def prompts(count=40, value_tokens=1, **changes):
    values = {"items": 4, "records": 6, "length_tokens": 160, "window_tokens": 24, "seed": 0}
    settings = ProbeSettings(probe="records", value_tokens=value_tokens, **(values | changes))
    probe = build_probe(settings, TOKENIZER)
    return [probe.prompt(row) for row in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_dialect_finds_the_weak_phase(target, kind):
    with FakeServer(kind, period=8, weak=7) as server:
        answers = list(target(server).answer(prompts()))
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer.status == "ok", answer
        assert answer.correct == (prompt.position_tokens % 8 != 7)
        if kind != "chat":
            assert answer.log_probability == pytest.approx(math.log(0.9 if answer.correct else 0.05))


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "openai", "chat"])
def test_samplers_and_caches_are_set_in_every_request(target, kind):
    with FakeServer(kind) as server:
        list(target(server).answer(prompts(8)))
        bodies = [b for b in server.bodies if b.get("cache_salt") != "isophase-check"]
    for body in bodies:
        samplers = body.get("sampling_params", body)
        assert samplers["temperature"] == 0
        assert samplers["top_p"] == 1
        assert samplers["presence_penalty"] == samplers["frequency_penalty"] == 0
        assert samplers.get("repetition_penalty", samplers.get("repeat_penalty", 1)) == 1
        assert body["stream"] is False
    if kind == "llamacpp":
        assert all(body["cache_prompt"] is False and body["dry_multiplier"] == 0 for body in bodies)
    if kind in ("vllm", "sglang"):
        salts = [body["cache_salt" if kind == "vllm" else "extra_key"] for body in bodies if len(str(body)) > 500]
        assert len(set(salts)) == len(salts) >= 8


@pytest.mark.parametrize("kind", IDS)
def test_ids_sent_are_the_ids_of_the_prompt(target, kind):
    with FakeServer(kind) as server:
        asked = prompts(6)
        list(target(server).answer(asked))
        sent = [body.get("input_ids", body.get("prompt")) for body in server.bodies]
    for prompt in asked:
        assert prompt.ids.tolist() in sent


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_log_probability_of_an_answer_not_among_the_alternatives(target, kind):
    """Two tokens: what follows a wrong first one says nothing, so the answer is scored by itself."""
    with FakeServer(kind, period=2, weak=0) as server:
        answers = list(target(server).answer(prompts(8, value_tokens=2)))
    assert all(answer.log_probability == pytest.approx(-3.0) for answer in answers)


def test_log_probability_is_unknown_where_nobody_can_say(target):
    with FakeServer("llamacpp", period=2, weak=0) as server:
        answers = list(target(server).answer(prompts(8, value_tokens=2)))
    assert all(math.isnan(answer.log_probability) for answer in answers)


def test_one_prompt_in_twenty_is_repeated(target):
    asked = [p for seed in range(4) for p in prompts(96, seed=seed)]
    with FakeServer("vllm") as server:
        answers = list(target(server).answer(asked))
    repeats = [a.repeat_agrees for a in answers if a.repeat_agrees is not None]
    assert 4 < len(repeats) < 40
    assert all(repeats)
    with FakeServer("vllm", flips=True) as server:
        flipped = list(target(server).answer(asked))
    assert [a.repeat_agrees is not None for a in flipped] == [a.repeat_agrees is not None for a in answers]
    assert not any(a.repeat_agrees for a in flipped)


@pytest.mark.parametrize("concurrency", [1, 5])
def test_requests_in_flight_are_bounded_and_answers_keep_their_prompts(target, concurrency):
    asked = prompts(30)
    with FakeServer("vllm", period=8, delay=0.01) as server:
        opened = target(server, concurrency=concurrency)
        numbers = dict(opened.stream(iter(asked)))
        assert server.most_in_flight == concurrency
    assert sorted(numbers) == list(range(30))
    assert all(numbers[n].correct == (p.position_tokens % 8 != 7) for n, p in enumerate(asked))


def test_prompts_are_read_only_as_they_are_asked(target):
    read = 0

    def source():
        nonlocal read
        for prompt in prompts(40):
            read += 1
            yield prompt

    with FakeServer("vllm") as server:
        stream = target(server, concurrency=4).stream(source())
        next(stream)
        assert read <= 9
        stream.close()


def test_facts(target):
    with FakeServer("vllm", block=16, limit=512) as server:
        opened = target(server)
        assert opened.control_periods == (16,)
        assert opened.max_length_tokens == 511
        about = opened.describe()
        assert (about["server"], about["version"], about["sends_ids"]) == ("vllm", "fake", True)
        assert about["notes"] == []
        assert opened.fingerprint() == target(server).fingerprint()
    with FakeServer("vllm", limit=256) as server:
        assert target(server).fingerprint() != opened.fingerprint()


def test_text_servers_are_marked(target):
    for kind, added in (("openai-text", 0), ("chat", 9)):
        with FakeServer(kind) as server:
            opened = target(server)
            list(opened.answer(prompts(3)))
            (unverified, cache) = opened.describe()["notes"]
        assert unverified.startswith("Phase unverified: ")
        assert f"({added} tokens)" in unverified
        assert "prefix cache" in cache


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_the_tokenizer_of_the_server(kind):
    with FakeServer(kind) as server:
        opened = ServerTarget(server.spec)
        assert opened.tokenizer.encode("cat red") == TOKENIZER.encode("cat red")
        assert opened.tokenizer.decode([5, 6]) == TOKENIZER.decode([5, 6])
        assert opened.tokenizer.prefix_ids == ()
        assert opened.tokenizer_source == ""


def refused(make, *parts, kind=IsophaseError):
    with pytest.raises(kind) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    for part in parts:
        assert part in str(caught.value)
    return caught.value


@pytest.mark.parametrize("kind", IDS)
def test_a_server_that_adds_a_token_is_refused(target, kind):
    with FakeServer(kind, bos=True, forget=["/tokenize"]) as server:
        refused(target(server).fingerprint, "does not read the tokens", "33 instead of 32")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "openai", "chat"])
def test_another_tokenizer_is_found_out(target, kind):
    with FakeServer(kind, offset=1) as server:
        refused(target(server).fingerprint, "tokenizer does not match", "--tokenizer")


def test_bad_access_and_names(target, monkeypatch):
    with FakeServer("vllm", keys=["right"]) as server:
        monkeypatch.setenv("ISOPHASE_API_KEY", "wrong-secret-key")
        error = refused(target(server).fingerprint, "refuses access", "ISOPHASE_API_KEY", "[key]")
        assert "wrong-secret-key" not in str(error)
        monkeypatch.delenv("ISOPHASE_API_KEY")
        refused(target(server).fingerprint, "401")
    with FakeServer("vllm", forget=["/v1/models", "/v1/completions", "/tokenize"]) as server:
        refused(target(server, kind="vllm").fingerprint, "404")
    with FakeServer("vllm") as server:
        refused(ServerTarget(server.url + "#other").fingerprint, "'other'", "planted")
        assert ServerTarget(server.url).facts.model == "planted"  # the only one


def test_nobody_listens(words_folder, quick_retries):
    with FakeServer("vllm") as server:
        spec, secure = server.spec, server.spec.replace("http:", "https:")
        refused(ServerTarget(secure).fingerprint, "no secure connection", kind=UnreachableError)
    error = refused(ServerTarget(spec).fingerprint, "cannot be reached", kind=UnreachableError)
    assert error.exit_code == 3


@pytest.mark.parametrize("url", ["http://", "http://user:pass@host/v1", "http://host/v1?key=1", "http://host:x/v1"])
def test_urls_that_are_none(url):
    error = refused(lambda: open_target(url + "#m"), "http://HOST:PORT/v1#MODEL")
    assert "pass" not in str(error).replace("password", "")


def test_options_that_cannot_work():
    for options in (ServerOptions(kind="gpt"), ServerOptions(concurrency=0), ServerOptions(timeout_seconds=0)):
        refused(lambda options=options: open_target("http://localhost:1/v1#m", server=options), "--")


def test_tokenizers_that_cannot_be_read(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    for source in (str(tmp_path), str(tmp_path / "none"), "./none"):
        opened = open_target("http://localhost:1/v1#m", server=ServerOptions(tokenizer=source))
        refused(lambda opened=opened: opened.tokenizer, "tokenizer", "--tokenizer")
