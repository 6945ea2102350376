"""curl, the client that everybody has: whole replies and streams, voted on and passed on."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="apt-get install curl")


def curl(url: str, *options: str, body: dict | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body as curl shows them."""
    data = [] if body is None else ["--json", json.dumps(body)]
    command = [CURL, "--silent", "--show-error", "--include", "--no-buffer", "--noproxy", "*", "--max-time", "20"]
    done = subprocess.run([*command, *data, *options, url], capture_output=True, check=True)
    head, _, content = done.stdout.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split()[1]), headers, content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_policy_off_is_the_server_itself(stub, proxy, ask, route, stream):
    server = proxy(policy="off")
    body = ask("echo", stream=stream, prompt="The code?")
    straight, through = (curl(f"{url}/{route}", body=body) for url in (stub.url, server.url))
    assert through == straight
    assert through[0] == 200
    assert (b"data: [DONE]" in through[2]) == stream


@pytest.mark.parametrize("stream", [False, True])
def test_a_vote(stub, proxy, ask, stream):
    # Wrong at shift 3 of 0, 1, 2, 3.
    status, headers, content = curl(f"{proxy().url}/chat/completions", body=ask("weak", stream=stream))
    assert status == 200
    assert headers["x-isophase-agreement"] in ("2/2", "3/3")  # as many as it took to settle the vote
    if not stream:
        assert json.loads(content)["choices"][0]["message"]["content"] == "The code is 42."
        return
    assert headers["content-type"].startswith("text/event-stream")
    *events, done, rest = content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(piece.get("content", "") for piece in pieces) == "The code is 42."


def test_opting_out_and_errors(stub, proxy, ask):
    url = proxy().url
    _, headers, _ = curl(f"{url}/chat/completions", "-H", "x-isophase-policy: off", body=ask("weak"))
    assert "x-isophase-agreement" not in headers
    status, _, content = curl(f"{url}/chat/completions", body=ask("503"))
    assert status == 503
    assert b"error" in content
    assert json.loads(curl(f"{url}/models")[2])["data"][0]["id"] == "echo"
