"""`isophase check` as a user types it."""

from __future__ import annotations

import json

import pytest
from fake_server import FakeServer

from isophase.errors import EXIT_NONE, EXIT_SENSITIVE, EXIT_UNREACHABLE, EXIT_USAGE

# `dog` stands at position 50, phase 2.
TEXT = " ".join(["the of and to"] * 12 + ["in that dog red it with"] + ["as for on be"] * 10 + ["? dog"])


@pytest.fixture
def prompt(tmp_path):
    (tmp_path / "prompt.txt").write_text(TEXT + "\n")
    return "prompt.txt"


def test_a_server_with_a_weak_phase(isophase, prompt, words_folder, tmp_path):
    common = (prompt, "--tokenizer", words_folder, "--json", "check.json")
    with FakeServer("vllm", period=8, weak=7) as server:
        done = isophase("check", *common, "--target", server.spec, "--expect", "red")
        assert done.code == EXIT_SENSITIVE, done
        found = json.loads((tmp_path / "check.json").read_text())
        assert found["changed_shifts"] == list(range(5, 48, 8))
        assert found["period_tokens"] == 8
        # Behind the record nothing moves it.
        behind = isophase("check", *common, "--target", server.spec, "--expect", "red", "--at", "?")
        assert behind.code == EXIT_NONE, behind
        voted = isophase("check", *common, "--target", f"{server.spec}|vote(8)", "--expect", "red")
        assert voted.code == EXIT_NONE, voted
        stable = isophase("check", *common, "--target", server.spec, "--stable", "--shifts", 24)
        assert stable.code == EXIT_SENSITIVE
        assert "period of 8 tokens" in stable.out
    with FakeServer("chat", period=8, weak=7) as server:
        done = isophase("check", *common, "--target", server.spec, "--expect", "red")
        assert done.code == EXIT_SENSITIVE
        assert "Phase unverified" in done.out


def refused(done, code, *parts):
    assert done.code == code, done
    assert len(done.err.splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err


def test_one_line(isophase, prompt, words_folder, tmp_path, quick_retries):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    tokenizer = ("--tokenizer", words_folder)
    with FakeServer("vllm", limit=128) as server:
        target = ("--target", server.spec, *tokenizer)
        refused(isophase("check", prompt, *target), EXIT_USAGE, "--expect TEXT or --stable")
        refused(isophase("check", prompt, *target, "--expect", "red", "--stable"), EXIT_USAGE, "either")
        refused(isophase("check", prompt, *target, "--expect", "red", "--at", "zoo"), EXIT_USAGE, "not in the prompt")
        refused(isophase("check", prompt, *target, "--expect", "red", "--at", "the"), EXIT_USAGE, "12 times")
        refused(isophase("check", prompt, *target, "--expect", "red " * 65), EXIT_USAGE, "65 tokens")
        refused(isophase("check", prompt, *target, "--expect", "red", "--shifts", "x"), EXIT_USAGE, "--shifts is 'x'")
        refused(isophase("check", prompt, *target, "--expect", "red"), EXIT_USAGE, "reads 127", "fewer --shifts")
        refused(isophase("check", "latin", *target, "--stable"), EXIT_USAGE, "not UTF-8")
        refused(isophase("check", "none", *target, "--stable"), EXIT_USAGE, "cannot read 'none'")
    refused(isophase("check", prompt, *target, "--stable"), EXIT_UNREACHABLE, "cannot be reached")
