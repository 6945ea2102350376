"""`isophase invariants` as a user types it."""

from __future__ import annotations

import json

from fake_server import FakeServer

from isophase.errors import EXIT_NONE, EXIT_SENSITIVE, EXIT_UNREACHABLE, EXIT_USAGE


def test_a_server(isophase, words_folder, tmp_path, quick_retries):
    options = ("--tokenizer", words_folder, "--json", "found.json", "--stride", 3)
    with FakeServer("vllm") as server:
        done = isophase("invariants", server.spec, *options)
        assert done.code == EXIT_NONE, done
        assert "passes all" in done.out
        assert "not testable  prefill split" in done.out
        assert json.loads((tmp_path / "found.json").read_text())["failed"] == 0
    with FakeServer("vllm", broken="warm") as server:
        done = isophase("invariants", server.spec, *options)
        assert done.code == EXIT_SENSITIVE
        assert "fail          warm against cold prefix" in done.out
        assert "smallest: a prefix of" in done.out
    gone = isophase("invariants", server.spec, *options)
    assert (gone.code, len(gone.err.splitlines())) == (EXIT_UNREACHABLE, 1)


def test_what_cannot_be_checked(isophase):
    done = isophase("invariants", "planted:")
    assert done.code == EXIT_USAGE
    assert "reads nothing" in done.err
