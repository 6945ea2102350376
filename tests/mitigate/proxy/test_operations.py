"""Logs, metrics, health, shutdown, settings, and many requests at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from running_proxy import wait_for

import isophase as package
from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.mitigate.proxy.app import create_app
from isophase.mitigate.proxy.settings import ProxySettings, parse_address

SOURCE = Path(package.__file__).parents[1]
KEY, SECRET = "sk-never-to-be-seen", "the patient's name is"


@pytest.fixture
def served(stub, tmp_path):
    """`served(*options)`: the command as a process of its own; its log goes to a file."""
    running = []

    def start(*options: str):
        log = tmp_path / "log.jsonl"
        command = [sys.executable, "-m", "isophase.cli.main", "serve", "--upstream", stub.url]
        command += ["--listen", "127.0.0.1:0", "--stride", "4", *options]
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                stderr=stream,
                env=os.environ | {"PYTHONPATH": str(SOURCE)},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        running.append(process)
        lines = []
        while not lines:
            assert process.poll() is None, log.read_text()
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return process, f"http://127.0.0.1:{lines[0]['port']}", log

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_logs_hold_no_text_and_no_key(served, http, ask):
    process, root, log = served()
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
    for model in ("weak", "401", "garbage", "echo"):
        text = " . . ." + SECRET
        http.post(f"{root}/v1/chat/completions?key={KEY}", json=ask(model, text=text), headers=headers)
    http.get(f"{root}/v1/{SECRET}", headers=headers)
    http.get(f"{root}/{KEY}", headers=headers)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    text = log.read_text()
    assert KEY not in text
    assert SECRET not in text
    assert "The code is" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    # A line is written when its request is done with, which may be behind the next one's.
    assert sorted(line["status"] for line in requests) == [200, 200, 401, 404, 502]
    assert {line.get("agreement") for line in requests} >= {"3/4"}
    assert {(line["route"], line["fault"]) for line in requests if line["status"] == 502} == {
        ("/v1/chat/completions", "broken")
    }
    [odd] = [line for line in lines if line["event"] == "disagreement"]
    assert odd["answer_by_shift"] == {"0": 0, "1": 1, "2": 1, "3": 1}
    assert "answers" not in odd
    assert lines[-1]["event"] == "stopped"


def test_answers_are_logged_where_that_is_asked_for(served, http, ask):
    _, root, log = served("--log-text")
    http.post(f"{root}/v1/chat/completions", json=ask(text=" . . .code"))
    assert "The code is 7." in log.read_text()


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_finished_before_the_end(stub, served, ask, way):
    stub.delay = 1.0
    process, root, _ = served()

    async def run() -> httpx2.Response:
        async with httpx2.AsyncClient(trust_env=False, timeout=20) as client:
            work = asyncio.ensure_future(client.post(f"{root}/v1/chat/completions", json=ask()))
            while stub.in_flight < 3:
                await asyncio.sleep(0.01)
            process.send_signal(way)
            return await work

    assert asyncio.run(run()).status_code == 200
    process.wait(20)


def test_metrics_count_what_happened(stub, proxy, http, ask):
    server = proxy(shifts=4)
    for text in (" . . .code", "code"):
        http.post(f"{server.url}/chat/completions", json=ask(text=text))
    http.post(f"{server.url}/chat/completions", json=ask("echo", n=2))
    # A client may have read its reply before the proxy has counted it out.
    counted = 'isophase_requests_total{policy="vote",route="/v1/chat/completions",status="200"} 3.0'
    wait_for(lambda: counted in http.get(f"{server.root}/metrics").text.splitlines())
    page = http.get(f"{server.root}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        'isophase_votes_total{outcome="agreed"} 1.0',
        'isophase_votes_total{outcome="disagreed"} 1.0',
        'isophase_votes_total{outcome="unvoted"} 1.0',
        "isophase_votes_settled_early_total 1.0",
        "isophase_shifts_total 7.0",
        counted,
        "isophase_in_flight 0.0",
        "isophase_shifts_off_total 0.0",
    ):
        assert line in page.text.splitlines(), line


def test_shifts_that_make_other_numbers_of_tokens_are_counted(stub, proxy, http, ask):
    stub.unit = "@"  # the server sees no neutral tokens at all: as where white space merges
    server = proxy(shifts=4)
    http.post(f"{server.url}/chat/completions", json=ask("echo"))
    # Three are asked; two may settle the vote.
    assert re.search(r"isophase_shifts_off_total [12]\.0", http.get(f"{server.root}/metrics").text)


def test_health_readiness_and_description(stub, proxy, http):
    server = proxy()
    assert http.get(f"{server.root}/healthz").json() == {"status": "ok"}
    assert http.get(f"{server.root}/readyz").status_code == 200
    assert http.get(f"{server.root}/healthz/").status_code == 404
    described = http.get(f"{server.root}/openapi.json").json()
    assert described["info"]["version"] == package.__version__
    assert set(described["paths"]) > {"/v1/chat/completions", "/v1/completions", "/v1/models"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"upstream": "localhost:8000"}, "no http or https URL"),
        ({"upstream": "http://user:secret@h/v1"}, "holds a user"),
        ({"upstream": "http://h/v1?key=secret"}, "holds a user"),
        ({"upstream": "http://h:99999/v1"}, "no URL"),
        ({"upstream": "http://h/v1\n"}, "white space"),
        ({"shifts": 0}, "number of shifts is 0"),
        ({"shifts": 99}, "--most-shifts is 16"),
        ({"strides_tokens": (0,)}, "stride is 0"),
        ({"concurrency": 2}, "--concurrency is 2"),
        ({"timeout_seconds": 0}, "--timeout is 0"),
        ({"unit": "\n"}, "--unit"),
        ({"tokenizer": "./nowhere"}, "no tokenizer"),
    ],
)
def test_settings_that_cannot_work(wrong, says):
    with pytest.raises(IsophaseError, match=says) as fault:
        create_app(ProxySettings(**{"upstream": "http://h/v1", **wrong}))
    assert "secret" not in str(fault.value)


def test_addresses():
    assert parse_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_address("[::1]:0") == ("::1", 0)
    for wrong in ("", "8080", "host", "h:x", "h:99999", "u@h:1", "h:1/x"):
        with pytest.raises(IsophaseError, match="--listen"):
            parse_address(wrong)


def load(root: str, body: dict, requests: int, in_flight: int, headers: dict) -> list[tuple[int, bytes]]:
    """Ask so many times with so many in flight."""

    async def run() -> list[tuple[int, bytes]]:
        limits = httpx2.Limits(max_connections=1)
        seen = []
        rest = iter(range(requests))

        async def worker() -> None:
            async with httpx2.AsyncClient(trust_env=False, timeout=60, limits=limits) as client:
                for _ in rest:
                    reply = await client.post(f"{root}/v1/chat/completions", json=body, headers=headers)
                    seen.append((reply.status_code, reply.content))

        await asyncio.gather(*(worker() for _ in range(in_flight)))
        return seen

    return asyncio.run(run())


@pytest.mark.parametrize(("policy", "fewest", "most"), [("off", 300, 300), ("vote", 600, 900)])
def test_hundreds_of_requests(stub, proxy, ask, policy, fewest, most):
    stub.log = False
    seen = load(proxy().root, ask("echo"), 300, 32, {"x-isophase-policy": policy})
    assert len(seen) == 300
    assert len(set(seen)) == 1
    assert seen[0][0] == 200
    # Two equal answers may settle a vote before the third request has left.
    assert fewest <= stub.requests <= most


@pytest.mark.slow
def test_ten_thousand_requests_at_64_in_flight(stub, served, ask):
    stub.log = False
    process, root, _ = served("--policy", "off")

    def resident_kib() -> int:
        text = Path(f"/proc/{process.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])

    memory = []
    for _ in range(5):
        seen = load(root, ask("echo"), 2_000, 64, {})
        assert {status for status, _ in seen} == {200}
        assert len(set(seen)) == 1
        memory.append(resident_kib())
    assert stub.most_in_flight <= 64
    assert max(memory) < 1.05 * memory[0] + resource.getpagesize() // 1024, memory


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen", "127.0.0.1:STUB"], "cannot listen"),
        (["--listen", "nowhere"], "--listen is 'nowhere'"),
        (["--policy", "maybe"], "--policy 'maybe' is unknown"),
        (["--policy", "align"], "no tokenizer is given"),
        (["--rule", "loudest"], "--rule 'loudest' is unknown"),
        (["--curve", "nowhere"], "cannot read 'nowhere'"),
    ],
)
def test_faults_of_the_command_are_one_line(stub, monkeypatch, capsys, options, says):
    given = [option.replace("STUB", str(stub.port)) for option in options]
    monkeypatch.setattr(sys, "argv", ["isophase", "serve", "--upstream", stub.url, *given])
    with pytest.raises(SystemExit) as end:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert (end.value.code, len(lines)) == (2, 1)
    assert says in lines[0]
