"""`isophase audit hf:DIR --cache METHOD`."""

from __future__ import annotations

import json
import sys

import pytest

from isophase.cli.main import main
from isophase.cli.options import with_variants
from isophase.errors import IsophaseError
from isophase.targets.huggingface import HuggingFaceTarget


def test_every_model_with_every_method() -> None:
    assert with_variants(["hf:a", "planted:period=4"], ["full", "snapkv(budget=64)"], None) == [
        "hf:a|full", "hf:a|snapkv(budget=64)", "planted:period=4",
    ]  # fmt: skip
    assert with_variants(["hf:a"], None, None) == ["hf:a"]
    for targets in (None, ["planted:period=4"]):
        with pytest.raises(IsophaseError, match="--cache compresses hf: targets, and none is given"):
            with_variants(targets, ["full"], None)


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["isophase", *arguments])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return int(str(code)), out.out, out.err


def test_methods_are_targets(folder, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    caches = ["chunkkv(budget=40, chunk_tokens=4)", "dynamic(budget=40)"]
    command = ["audit", f"hf:{folder}", "--cache", caches[0], "--cache", caches[1], "--items", "3", "--records", "3"]
    command += ["--length", "220", "--demonstrations", "0", "--style", "sentences", "--window", "8", "--out", "run"]
    code, out, err = run(monkeypatch, capsys, *command, "--json", "-")
    assert code in (0, 10, 11), err
    found = json.loads(out)
    assert [f["target"] for f in found["findings"]] == [f"hf:{folder}|{cache}" for cache in caches]
    assert [f["stride_tokens"] for f in found["findings"]] == [4, None]
    answers = (tmp_path / "run" / "answers.jsonl").read_bytes()
    code, _, err = run(monkeypatch, capsys, *command)
    assert code in (0, 10, 11), err
    assert (tmp_path / "run" / "answers.jsonl").read_bytes() == answers


def test_methods_share_one_reading(folder, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    caches = ["chunkkv(budget=40, chunk_tokens=4)", "dynamic(budget=40)", "snapkv(budget=90, window_tokens=80)"]
    read = []
    forward = HuggingFaceTarget._forward

    def counting(self, ids, keep, **kwargs):
        read.append(tuple(ids.shape))
        return forward(self, ids, keep, **kwargs)

    monkeypatch.setattr(HuggingFaceTarget, "_forward", counting)

    def answers(out: str, *chosen: str) -> dict[int, dict[str, object]]:
        command = ["audit", f"hf:{folder}", "--items", "3", "--records", "3", "--length", "220", "--out", out]
        command += ["--demonstrations", "0", "--style", "sentences", "--window", "8"]
        for cache in chosen:
            command += ["--cache", cache]
        code, _, err = run(monkeypatch, capsys, *command)
        assert code in (0, 10, 11), err
        lines = (tmp_path / out / "answers.jsonl").read_text().splitlines()
        return {line["row"]: line for line in map(json.loads, lines) if "row" in line}

    together = answers("together", *caches)
    assert len(together) == 72
    # The third method has a window of its own, and reads again only because 80 queries are more than were recorded.
    assert read.count((8, 219)) == 6
    for number, cache in enumerate(caches):
        alone = answers(f"alone{number}", cache)
        assert len(alone) == 24
        for row, line in alone.items():
            assert {**together[row + 24 * number], "row": row} == line


def test_a_bad_method_is_one_line(folder, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, "audit", f"hf:{folder}", "--cache", "chunkkv(budget=4)", "--out", "run")
    assert code == 2
    assert "budget 4 is below the window of 16 tokens" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
