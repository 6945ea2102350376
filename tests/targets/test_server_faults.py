"""A run of 500 prompts with every fault in its middle: nothing is lost, no fault counts as a miss."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import pytest
from fake_server import FakeServer

from isophase.audit.analyse import build_report
from isophase.audit.plan import make_plan
from isophase.audit.run import run_plan
from isophase.audit.settings import AuditSettings
from isophase.audit.store import read_answers
from isophase.errors import IsophaseError
from isophase.targets.server import http as server_http
from isophase.targets.server.connect import UnreachableError
from isophase.targets.server.target import ServerTarget

# Fault and how it ends when it does not pass: a word of the reason.
RETRIED = {
    "429": "429",
    "429-retry-after": "429",
    "500": "500",
    "503": "503",
    "drop": "connection failed",
    "cut-body": "connection failed",
    "truncated": "not JSON",
    "html": "text/html",
    "duplicate": "not JSON",
    "hang": "no complete reply within",
    "drip": "no complete reply within",
}
FINAL = {
    "400": "400",
    "echo": "other tokens",
    "huge": "longer than",
    "endless": "longer than",
    "redirect": "elsewhere.invalid",
    "empty": "reply",
}


@pytest.fixture
def audit(words_folder, tmp_path, quick_retries):
    """Plan and ask; items x 20 prompts."""

    def build(server, items=25, folder="run", **options):
        target = ServerTarget(server.spec, tokenizer=str(words_folder), **({"timeout_seconds": 5.0} | options))
        settings = AuditSettings(
            targets=(server.spec,), control="none", items=items, window_tokens=20, records=6, length_tokens=160
        )
        plan = make_plan(settings, lambda _: target, pilot=False)
        run_plan(plan, tmp_path / folder, lambda _: target)
        return plan, target

    return build


def test_every_fault_in_a_run_of_500(audit, tmp_path, monkeypatch):
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("ISOPHASE_API_KEY", key)
    # Of a reply that says no length so much is read; 16 MiB take a busy machine longer than this test waits.
    monkeypatch.setattr(server_http, "_MOST_REPLY_BYTES", 1 << 20)
    faults = {}
    for n, name in enumerate(RETRIED):
        faults[20 + 20 * n] = (name, 1)
        faults[30 + 20 * n] = (name, -1)
    for n, name in enumerate(FINAL):
        faults[300 + 20 * n] = (name, -1)
    with FakeServer("vllm", period=5, weak=4, faults=faults, keys=[key]) as server:
        plan, target = audit(server)
        asked = server.asked.copy()
        by_fault = {faults[n]: name for name, n in server.order.items() if n in faults}
        assert all(h.get("authorization") == f"Bearer {key}" for h in server.headers)
    answers, _ = read_answers(tmp_path / "run")
    assert sorted(answers) == list(range(500))
    statuses = Counter(answer.status for answer in answers.values())
    assert statuses == {"ok": 500 - len(RETRIED) - len(FINAL), "error": len(RETRIED) + len(FINAL)}
    reasons = sorted(answer.detail for answer in answers.values() if answer.status == "error")
    for word in [*RETRIED.values(), *FINAL.values()]:
        assert any(word in reason for reason in reasons), (word, reasons)
    # Never a retry where it cannot help; a bounded number where it can.
    for name in FINAL:
        assert asked[by_fault[name, -1]] == 1, name
    for name in RETRIED:
        assert asked[by_fault[name, -1]] == 3, name
        assert 2 <= asked[by_fault[name, 1]] <= 3, name  # one may be repeated for the flip rate
    report = build_report(tmp_path / "run", lambda _: target.tokenizer)
    assert report.statuses == statuses
    judged = [a for a in answers.values() if a.status == "ok"]
    assert all(math.isnan(a.log_probability) for a in answers.values() if a.status == "error")
    assert 0.7 < sum(a.correct for a in judged) / len(judged) < 0.9
    for file in (tmp_path / "run").rglob("*"):
        assert key.encode() not in file.read_bytes()
    assert plan.rows == 500


def test_retry_after_is_honoured(audit, tmp_path):
    with FakeServer("vllm", faults={3: ("429-retry-after", 1)}) as server:
        began = time.monotonic()
        audit(server, items=2)
        assert time.monotonic() - began >= 0.2
    assert {a.status for a in read_answers(tmp_path / "run")[0].values()} == {"ok"}


def test_a_killed_server_ends_the_run_and_a_new_one_resumes_it(audit, tmp_path):
    server = FakeServer("vllm", delay=0.02).__enter__()

    def kill():
        wait_for(lambda: len(server.asked) > 120)
        server.__exit__()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(UnreachableError, match=r"stopped answering .* resumes"):
        audit(server)
    killer.join()
    before, _ = read_answers(tmp_path / "run")
    assert 50 < len(before) < 500
    assert {a.status for a in before.values()} == {"ok"}
    with FakeServer("vllm", port=server.port) as server:
        audit(server)
        assert len(server.asked) == 500 - len(before)
    lines = (tmp_path / "run" / "answers.jsonl").read_bytes().splitlines()
    answers, _ = read_answers(tmp_path / "run")
    assert len(lines) == len(answers) == 500


def wait_for(condition):
    while not condition():
        time.sleep(0.005)


def test_a_key_that_expires_stops_the_run(audit, tmp_path, monkeypatch):
    monkeypatch.setenv("ISOPHASE_API_KEY", "old")
    with FakeServer("vllm", keys=["old"], delay=0.005) as server:
        expire = threading.Thread(target=lambda: (wait_for(lambda: len(server.asked) > 60), server.keys.clear(),
                                                  server.keys.append("new")))  # fmt: skip
        expire.start()
        with pytest.raises(IsophaseError, match="refuses access"):
            audit(server)
        expire.join()
    answers, _ = read_answers(tmp_path / "run")
    assert 0 < len(answers) < 500
    assert {a.status for a in answers.values()} == {"ok"}


def test_control_periods_and_flips_reach_the_report(audit, tmp_path):
    with FakeServer("vllm", block=10, flips=True) as server:
        _, target = audit(server)
        report = build_report(tmp_path / "run", lambda _: target.tokenizer)
    assert [t.control for t in report.scan if t.period_tokens == 10] == [True]
    assert report.repeats == report.flips > 5
    assert any("flip rate 100.0%" in note for note in report.notes)
    with FakeServer("vllm", block=64) as server:
        plan, _ = audit(server, items=2, folder="other")
    assert any("64 tokens, does not fit the window" in note for note in plan.notes)
