"""Policy off: the client sees what the server sent, byte by byte, and the server what the client sent."""

from __future__ import annotations

import json

import httpx2
import openai
import pytest


@pytest.mark.parametrize("route", ["chat/completions", "completions", "embeddings"])
@pytest.mark.parametrize("stream", [False, True])
def test_same_bytes_both_ways(stub, proxy, http, ask, route, stream):
    server = proxy(policy="off")
    body = ask("echo", stream=stream, prompt="The code", input="x", n=2)
    raw = json.dumps(body, indent=3).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer k", "x-other": "1", "accept": "*/*"}
    straight = http.post(f"{stub.url}/{route}?api-version=1", content=raw, headers=headers)
    through = http.post(f"{server.url}/{route}?api-version=1", content=raw, headers=headers)
    assert (through.status_code, through.content) == (straight.status_code, straight.content)
    assert dict(through.headers) == dict(straight.headers)
    assert stub.raw_bodies[0] == stub.raw_bodies[1] == raw
    assert stub.lines[0] == stub.lines[1]
    first, second = (dict(one) for one in stub.headers)
    assert {**second, "host": "", "connection": ""} == {**first, "host": "", "connection": ""}


def test_a_chunked_request_is_read_whole(stub, proxy, http, ask):
    raw = json.dumps(ask("echo")).encode()
    reply = http.post(f"{proxy(policy='off').url}/chat/completions", content=iter([raw[:9], raw[9:]]))
    assert reply.status_code == 200
    assert stub.raw_bodies == [raw]
    assert dict(stub.headers[0])["content-length"] == str(len(raw))


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 503])
@pytest.mark.parametrize("policy", ["off", "vote"])
def test_errors_of_the_server_come_as_they_are(stub, proxy, http, ask, status, policy):
    server = proxy(policy=policy)
    straight = http.post(f"{stub.url}/chat/completions", json=ask(str(status)))
    through = http.post(f"{server.url}/chat/completions", json=ask(str(status)))
    assert (through.status_code, through.content) == (status, straight.content)
    assert through.headers.get("retry-after") == ("7" if status == 429 else None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client(stub, proxy, stream):
    with openai.OpenAI(base_url=proxy(policy="off").url, api_key="sk-none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["echo"]
        messages = [{"role": "user", "content": "The code?"}]
        if stream:
            events = client.chat.completions.create(model="echo", messages=messages, stream=True)
            assert "".join(event.choices[0].delta.content or "" for event in events) == "The code is 42."
            events = client.completions.create(model="echo", prompt="The code?", stream=True)
            assert "".join(event.choices[0].text for event in events) == "The code is 42."
        else:
            reply = client.chat.completions.create(model="echo", messages=messages)
            assert reply.choices[0].message.content == "The code is 42."
            assert client.completions.create(model="echo", prompt="x", n=2).choices[1].text == "The code is 42."


def test_a_stream_is_not_held_back(stub, proxy, http, ask):
    with http.stream("POST", f"{proxy(policy='off').url}/chat/completions", json=ask("slow-stream", stream=True)) as r:
        parts = r.iter_raw()
        assert b"The" in next(parts)
        assert stub.in_flight == 1  # it has not written the rest
        stub.released = True
        assert b"[DONE]" in b"".join(parts)


def test_a_key_is_not_asked_for_nor_added(stub, proxy, http, ask):
    httpx2.post(f"{proxy(policy='off').url}/chat/completions", json=ask("echo"), trust_env=False)
    assert "authorization" not in dict(stub.headers[0])
