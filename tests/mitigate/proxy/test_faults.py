"""Servers that die, hang, drip, send garbage or redirect; clients that leave; bodies and headers that attack."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import httpx2
import pytest
from running_proxy import wait_for

FAULTS = {
    "die": (502, "broken"),
    "garbage": (502, "broken"),
    "redirect": (502, "redirect"),
    "hang": (504, "timeout"),
}


@pytest.mark.parametrize("policy", ["off", "vote"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_server_is_an_error_with_a_name(stub, proxy, http, ask, fault, policy):
    server = proxy(policy=policy, timeout_seconds=0.5)
    reply = http.post(f"{server.url}/chat/completions", json=ask(fault))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (*FAULTS[fault], "isophase_proxy")
    assert "elsewhere" not in reply.text
    assert f'isophase_upstream_faults_total{{kind="{FAULTS[fault][1]}"}}' in http.get(f"{server.root}/metrics").text
    # And it goes on serving.
    assert http.post(f"{server.url}/chat/completions", json=ask("echo")).status_code == 200


def test_a_server_that_is_gone(stub, proxy, http, ask):
    server = proxy()
    stub.__exit__()
    reply = http.post(f"{server.url}/chat/completions", json=ask())
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "unreachable")
    assert http.get(f"{server.root}/readyz").status_code == 503
    assert http.get(f"{server.root}/healthz").status_code == 200
    stub.__enter__()


@pytest.mark.parametrize("fault", ["cut", "drip"])
def test_a_reply_that_breaks_off_breaks_off_for_the_client_too(stub, proxy, http, ask, fault):
    server = proxy(policy="off", timeout_seconds=0.5)
    with pytest.raises(httpx2.RemoteProtocolError):
        http.post(f"{server.url}/chat/completions", json=ask(fault))
    reply = http.post(f"{server.url}/chat/completions", json=ask(fault), headers={"x-isophase-policy": "vote"})
    assert reply.status_code in (502, 504)


def test_a_reply_that_is_no_answer_comes_as_it_is(stub, proxy, http, ask):
    reply = http.post(f"{proxy().url}/chat/completions", json=ask("html"))
    assert (reply.status_code, reply.text) == (200, "<html>login</html>")
    assert reply.headers["x-isophase-agreement"] == "unvoted; no shift was answered"


def test_a_reply_that_is_too_long_for_a_vote(stub, proxy, http, ask):
    server = proxy(reply_bytes=1 << 20)
    assert http.post(f"{server.url}/chat/completions", json=ask("huge")).json()["error"]["code"] == "too_long"
    off = http.post(f"{server.url}/chat/completions", json=ask("huge"), headers={"x-isophase-policy": "off"})
    assert len(off.content) == 64 << 16


def test_a_refusal_is_not_repeated_at_every_shift(stub, proxy, http, ask):
    http.post(f"{proxy(shifts=8, strides_tokens=(8,)).url}/chat/completions", json=ask("401"))
    assert stub.requests <= 5


@pytest.mark.parametrize("policy", ["off", "vote"])
def test_a_client_that_leaves_ends_the_request_to_the_server(stub, proxy, ask, policy):
    server = proxy(policy=policy)
    body = ask("slow-stream" if policy == "off" else "hang", stream=policy == "off")
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(request_head(len(raw)) + raw)
        if policy == "off":
            assert client.recv(100)
        wait_for(lambda: stub.in_flight == (1 if policy == "off" else 3))
    wait_for(lambda: stub.in_flight == 0)
    assert stub.hung_up == (1 if policy == "off" else 3)
    wait_for(lambda: 'status="499"} 1.0' in httpx2.get(f"{server.root}/metrics", trust_env=False).text)


def test_a_client_that_leaves_in_the_middle_of_its_body(stub, proxy, http):
    server = proxy()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(request_head(100) + b"half")
    assert http.get(f"{server.root}/healthz").status_code == 200
    assert stub.requests == 0


def request_head(length: int | str, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {length}\r\n{more}\r\n".encode()


def exchange(port: int, raw: bytes) -> bytes:
    """What comes back until the other side closes, or is silent for a while."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as client:
        client.sendall(raw)
        got = b""
        try:
            while part := client.recv(1 << 16):
                got += part
        except (TimeoutError, ConnectionResetError):
            pass
        return got


def test_oversized_bodies_are_refused_before_they_are_read(stub, proxy, http, ask):
    server = proxy(body_bytes=1000)
    assert http.post(f"{server.url}/chat/completions", json=ask(text="x" * 2000)).status_code == 413
    assert http.post(f"{server.url}/chat/completions", content=iter([b"x" * 600] * 2)).status_code == 413
    assert b" 413 " in exchange(server.port, request_head(10**15))
    assert stub.requests == 0


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        request_head(4, more="transfer-encoding: chunked\r\n") + b"0\r\n\r\n" + SMUGGLED,
        request_head(4, more="content-length: 60\r\n") + b"{}  " + SMUGGLED,
        request_head(4, more="transfer-encoding: xchunked\r\n") + b"{}  " + SMUGGLED,
        request_head(4, more="transfer-encoding : chunked\r\n") + b"0\r\n\r\n" + SMUGGLED,
        request_head("+4") + b"{}  " + SMUGGLED,
        request_head("4, 4") + b"{}  " + SMUGGLED,
        request_head("0x4") + b"{}  " + SMUGGLED,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n"
        b"transfer-encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n" + SMUGGLED,
    ],
    ids=range(9),
)
@pytest.mark.parametrize("policy", ["off", "vote"])
def test_request_smuggling(stub, proxy, raw, policy):
    """No body whose end could be seen elsewhere reaches the server, nor anything behind it."""
    got = exchange(proxy(policy=policy).port, raw)
    assert got.startswith(b"HTTP/1.1 400"), got
    assert b" 200 " not in got
    assert stub.requests == 0


def test_headers_cannot_be_injected(stub, proxy, http, ask):
    server = proxy(policy="off")
    got = exchange(server.port, request_head(2, more="x-a: b\rx-evil: 1\r\n") + b"{}")
    assert got == b"" or got.startswith(b"HTTP/1.1 400")
    got = exchange(server.port, request_head(2, more="x-a: b\x00c\r\n") + b"{}")
    assert got == b"" or got.startswith(b"HTTP/1.1 400")
    assert stub.requests == 0
    http.post(
        f"{server.url}/chat/completions",
        json=ask("echo"),
        headers={"connection": "x-secret, close", "x-secret": "1", "te": "trailers", "proxy-authorization": "Basic x"},
    )
    names = {name for name, _ in stub.headers[-1]}
    assert not names & {"x-secret", "te", "proxy-authorization", "transfer-encoding"}


@pytest.mark.parametrize(
    "path",
    ["/v1/../admin", "/v1/%2e%2e/admin", "/v1/models/../../admin", "/v1/models/%2e%2e%2fadmin", "/v1//admin",
     "/v1/models/%252e%252e/x", "/v1/models/a%0d%0ax-evil:1", "/v1/models\\..\\x", "/v1/models/%00", "/v1/files",
     "/v1/", "/v1", "/admin", "//evil.invalid/v1/models", "/v1/models/;/x", "/v1/chat/completions/../../models"],
)  # fmt: skip
def test_paths_outside_v1_do_not_reach_the_server(stub, proxy, path):
    got = exchange(proxy().port, f"GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n".encode())
    assert got.split(b"\r\n")[0] in (b"HTTP/1.1 404 Not Found", b"HTTP/1.1 400 Bad Request"), got
    assert stub.requests == 0


def test_an_absolute_target_goes_to_the_server_all_the_same(stub, proxy):
    raw = b"GET http://evil.invalid/v1/models HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
    assert b'"echo"' in exchange(proxy().port, raw)
    assert stub.lines[0].startswith("GET /v1/models ")
    assert dict(stub.headers[0])["host"] == f"127.0.0.1:{stub.port}"


def test_a_model_with_a_slash_in_its_name(stub, proxy, http):
    assert http.get(f"{proxy().url}/models/org%2Fname").status_code == 200
    assert stub.lines == ["GET /v1/models/org%2Fname HTTP/1.1"]


def test_wrong_methods(stub, proxy, http):
    server = proxy()
    got = http.get(f"{server.url}/chat/completions")
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert http.delete(f"{server.url}/models/echo").status_code == 405
    assert http.post(f"{server.root}/healthz").status_code == 405
    assert stub.requests == 0


def test_more_requests_than_the_limit(stub, proxy, http, ask):
    server = proxy(policy="off", concurrency=4, most_shifts=4)
    raw = json.dumps(ask("hang")).encode()
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(request_head(len(raw)) + raw)
        wait_for(lambda: stub.in_flight == 4)
        refused = http.post(f"{server.url}/chat/completions", json=ask("echo"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_busy")
        assert refused.headers["retry-after"] == "1"
        assert stub.requests == 4
    wait_for(lambda: stub.in_flight == 0)
    assert http.post(f"{server.url}/chat/completions", json=ask("echo")).status_code == 200
