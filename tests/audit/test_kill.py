from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from isophase.audit.store import read_answers

KILLS = 10
WIDTH = 8


@pytest.fixture(params=["ungrouped", "grouped"])
def driver(request):
    """The driver on an ungrouped planted target, and on a model that gets items whole."""
    if request.param == "grouped":
        spec = f"hf:{request.getfixturevalue('tiny_model')}"
    else:
        spec = "planted:period=8,amplitude=.2,accuracy=.75"
    script = Path(__file__).with_name("asking.py")
    with subprocess.Popen(
        [sys.executable, str(script), spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, request.param == "grouped"
        process.communicate()


def rows_in(log):
    return [int(row) for row in log.read_text().split()] if log.exists() else []


def ask(process, folder, log, milliseconds, kill_after=None):
    """One attempt; the wait status. It is killed a random moment after so many rows were asked."""
    before = len(rows_in(log))
    process.stdin.write(f"{folder} {log} {milliseconds}\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    if kill_after is not None:
        patience = time.monotonic() + 60
        while len(rows_in(log)) < before + kill_after and time.monotonic() < patience:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
    return int(process.stdout.readline())


def test_kill_at_random_instants_then_resume(driver, tmp_path):
    process, grouped = driver
    calm, killed, log = tmp_path / "calm", tmp_path / "killed", tmp_path / "log"
    assert ask(process, calm, tmp_path / "calm-log", 0) == 0

    rng = random.Random(7)
    in_flight = Counter()
    read = busy = 0
    for attempt in range(KILLS + 1):
        durable = set(read_answers(killed)[0]) if killed.exists() else set()
        last = attempt == KILLS
        status = ask(process, killed, log, 0 if last else 15, None if last else rng.randint(0, 14))
        assert os.WIFEXITED(status) if last else os.WTERMSIG(status) == signal.SIGKILL
        rows = rows_in(log)
        asked, read = Counter(rows[read:]), len(rows)
        assert max(asked.values(), default=1) == 1
        busy += bool(asked)
        again = set(asked) & durable
        if grouped:
            # Only an item whose lines were cut off in the middle is read again, as a whole.
            assert len({row // WIDTH for row in again}) <= 1
            assert all(not set(range(r - r % WIDTH, r - r % WIDTH + WIDTH)) <= durable for r in again)
        else:
            assert not again
        in_flight.update(set(asked) - set(read_answers(killed)[0]) if killed.exists() else asked)
        in_flight.update(again)
        if not last:
            assert not (killed / "manifest.json").exists()
    assert busy >= KILLS // 2
    total = Counter(int(row) for row in log.read_text().split())
    assert set(total) == set(range(20 * WIDTH))
    assert all(total[row] == 1 + in_flight[row] for row in total)
    assert sum(in_flight.values()) < KILLS * 4 * WIDTH
    for name in ("answers.jsonl", "plan.json"):
        assert (killed / name).read_bytes() == (calm / name).read_bytes()
