"""Commands against a server, as a user types them."""

from __future__ import annotations

import gc
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_server import FakeServer

from isophase.errors import EXIT_INTERRUPTED, EXIT_SENSITIVE, EXIT_UNREACHABLE, EXIT_USAGE

SMALL = ("--items", 8, "--records", 6, "--length", 160, "--window", 24)


def test_audit_report_and_show(isophase, tmp_path, words_folder):
    with FakeServer("vllm", period=8, weak=7) as server:
        options = ("--tokenizer", words_folder, "--concurrency", 4)
        done = isophase("audit", server.spec, *SMALL, *options, "--out", "run", "--json", "report.json")
        assert done.code == EXIT_SENSITIVE
        assert "192 prompts of up to 160 tokens, 30,720 tokens to read" in done.err
        assert server.most_in_flight <= 4
        asked = server.requests
        again = isophase("audit", server.spec, *SMALL, "--tokenizer", words_folder, "--out", "run")
        assert again.code == EXIT_SENSITIVE
        assert len(server.asked) == 192
        assert server.requests < asked + 10  # only what opening it needs
        assert isophase("plan", server.spec, *SMALL, *options).code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["period_tokens"] == 8
    assert report["flips"] == 0 < report["repeats"]
    # The server is gone; what it answered is not.
    assert isophase("report", "run").code == 0
    assert isophase("compare", "run", "run").code == 0
    shown = isophase("show", "run", "--row", 3)
    assert shown.code == 0
    assert "status: ok" in shown.out


def test_the_tokenizer_may_come_from_the_server(isophase):
    with FakeServer("vllm", period=8, weak=7) as server:
        assert isophase("audit", server.spec, *SMALL, "--out", "run").code == EXIT_SENSITIVE
        assert isophase("report", "run").code == 0
    assert isophase("report", "run").code == EXIT_UNREACHABLE


def test_an_audit_measures_what_a_vote_gains(isophase, tmp_path, words_folder):
    with FakeServer("vllm", period=8, weak=7) as server:
        done = isophase(
            "audit", server.spec, *SMALL, "--vote", 1, "--vote", 8, "--tokenizer", words_folder, "--out", "run",
            "--json", "report.json",
        )  # fmt: skip
        assert done.code == EXIT_SENSITIVE, done
        assert "192 prompts of up to 160 tokens, each at 8 shifts, 245,760 tokens to read" in done.err
        plain, voted = json.loads((tmp_path / "report.json").read_text())["findings"]
        assert plain["period_tokens"] == 8
        assert voted["target"] == f"{server.spec}|vote(8)"
        assert voted["accuracy"] == 1.0
    # What the server answered can be read without it.
    assert isophase("report", "run").code == 0


def refused(done, code, *parts):
    assert done.code == code, done
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err


def test_one_line(isophase, words_folder, tmp_path, quick_retries):
    tokenizer = ("--tokenizer", words_folder)
    with FakeServer("vllm", limit=128) as server:
        refused(isophase("audit", server.spec, *SMALL, *tokenizer), EXIT_USAGE, "prompts of 160 tokens exceed the 127")
        refused(isophase("audit", server.url + "#none", *tokenizer), EXIT_USAGE, "serves no model 'none'", "planted")
        refused(isophase("audit", server.spec, *tokenizer, "--server", "gpt"), EXIT_USAGE, "--server 'gpt'")
        refused(isophase("audit", server.spec, *tokenizer, "--concurrency", 0), EXIT_USAGE, "--concurrency is 0")
        refused(isophase("audit", server.spec, "--tokenizer", tmp_path), EXIT_USAGE, "there is no tokenizer")
        gone = server.spec
    refused(isophase("audit", gone, *tokenizer), EXIT_UNREACHABLE, "cannot be reached", "Check the address")
    refused(isophase("audit", gone), EXIT_UNREACHABLE, "cannot be reached")
    refused(isophase("audit", "http://no-such-host.invalid/v1#m"), EXIT_UNREACHABLE, "cannot be reached")
    assert list(tmp_path.iterdir()) == []


FAULTS = {
    "no key": ({"keys": ["right"]}, "#planted", "refuses access (HTTP 401", "ISOPHASE_API_KEY"),
    "forbidden": ({"keys": ["right"], "denial": 403}, "#planted", "refuses access (HTTP 403", "ISOPHASE_API_KEY"),
    "no route": (
        {"forget": ["/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize"]}, "#planted", "404", "Check",
    ),
    "no model": ({}, "#gpt", "serves no model 'gpt'", "planted"),
    "other ids echoed": ({"bos": True, "forget": ["/tokenize"]}, "#planted", "33 instead of 32", "retokenises"),
    "other tokenizer": ({"offset": 1}, "#planted", "the tokenizer does not match", "--tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", ["audit", "plan", "check", "invariants"])
def test_servers_that_cannot_be_used(isophase, words_folder, tmp_path, quick_retries, command, fault):
    settings, model, *parts = FAULTS[fault]
    (tmp_path / "prompt.txt").write_text("the of and cat red ? cat")
    with FakeServer("vllm", **settings) as server:
        target = server.url + model
        given = ("prompt.txt", "--stable", "--target", target) if command == "check" else (target,)
        refused(isophase(command, *given, "--tokenizer", words_folder), EXIT_USAGE, *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.txt"]


def test_a_tokenizer_of_other_counts(isophase, words_folder, quick_retries, monkeypatch):
    """A server that names no ids of its own is found out by its counts."""
    with FakeServer("chat", forget=["/tokenize"]) as server:
        monkeypatch.setattr("fake_server.TOKENIZER.encode", lambda text: list(text.encode()))
        refused(isophase("audit", server.spec, "--tokenizer", words_folder), EXIT_USAGE, "counts", "--tokenizer")


def test_ctrl_c_leaves_a_run_that_resumes(process, isophase, tmp_path, words_folder):
    with FakeServer("vllm", period=8, weak=7, delay=0.05) as server:
        command = ("audit", server.spec, *SMALL, "--tokenizer", words_folder, "--out", "run", "--concurrency", 4)
        with process(*command) as running:
            while len(server.asked) < 40:
                time.sleep(0.01)
                assert running.poll() is None
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=30)
        assert running.returncode == EXIT_INTERRUPTED
        assert "interrupted; an audit resumes" in err
        assert "Traceback" not in err
        lines = (tmp_path / "run" / "answers.jsonl").read_bytes().splitlines()
        assert len(lines) >= 30
        server.delay = 0
        before = len(server.asked)
        assert isophase(*command).code == EXIT_SENSITIVE
        assert len(server.asked) == 192
        # What was in flight is asked again, or came while an answer was being written; nothing else.
        assert 0 <= before - len(lines) < 2 * 4
    rows = [json.loads(line)["row"] for line in (tmp_path / "run" / "answers.jsonl").read_bytes().splitlines()]
    assert sorted(rows) == list(range(192))


@pytest.mark.slow
def test_the_protocol_of_the_paper_says_its_cost_first(process, smollm2_folder):
    """The commands of docs/guides/audit-a-model.md, up to the first questions of 128,000 tokens."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "audit-a-model.md").read_text().replace("\\\n", " ")
    lines = [shlex.split(line)[1:] for line in page.splitlines() if "--length 128000" in line]
    assert [line[0] for line in lines] == ["plan", "audit"]
    assert lines[0][1:] == lines[1][1:]
    with FakeServer("vllm", limit=131072, log=False, forget=["/tokenize"]) as server:
        plan, audit = ([server.spec if "#MODEL" in word else word for word in line] for line in lines)
        with process(*plan, "--tokenizer", smollm2_folder) as running:
            out, err = running.communicate()
        assert running.returncode == 0, err
        assert "2,048  262,144,000" in out
        assert not server.asked
        with process(*audit, "--tokenizer", smollm2_folder, "--out", "run") as running:
            cost = running.stderr.readline()
            while not server.asked:
                assert running.poll() is None, running.communicate()
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=60)
        assert running.returncode == EXIT_INTERRUPTED
    assert "2,048 prompts of up to 128,000 tokens, 262,144,000 tokens to read" in cost


def test_help_names_the_variable_nowhere_but_the_options(isophase):
    plain = re.sub(r"\s+", " ", isophase("audit", "--help").out)
    for option in ("--server", "--concurrency", "--tokenizer", "--timeout"):
        assert option in plain


@pytest.mark.slow
def test_memory_stays_flat(words_folder):
    """20,000 requests; what is kept does not grow with them."""
    import fake_server

    from isophase.probes import ProbeSettings, build_probe
    from isophase.targets.server.target import ServerTarget

    settings = ProbeSettings(probe="records", items=8, records=6, length_tokens=120, window_tokens=24, seed=0)
    probe = build_probe(settings, fake_server.TOKENIZER)
    command = [sys.executable, fake_server.__file__, json.dumps({"kind": "vllm", "log": False})]
    # A process of its own: what the server keeps is not what the client keeps.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1#planted"
            target = ServerTarget(url, tokenizer=str(words_folder), concurrency=32)
            blocks, resident = [], []
            for number, (_, answer) in enumerate(target.stream(probe.prompt(n % len(probe)) for n in range(20_000))):
                assert answer.status == "ok"
                if number in (4_000, 19_000):
                    gc.collect()
                    blocks.append(sys.getallocatedblocks())
                    resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        finally:
            server.kill()
    # One object kept of each request would be 15,000 blocks.
    assert blocks[1] < blocks[0] + 1_500
    assert resident[1] < resident[0] + (4 << 20)
