"""`isophase align` as a user types it: files, undo, and faults in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import isophase as package
from isophase.cli.main import main
from isophase.mitigate.align import file as align_file

LINES = b"the ? the\r\nthe the the ? the the\r\nthe ?\r\n" * 5


@pytest.fixture
def isophase(monkeypatch, capsys, tmp_path):
    """Run a command below `tmp_path`; exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_bytes(LINES)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isophase", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def test_there_and_back(isophase, tmp_path, words_folder):
    options = ("--tokenizer", words_folder, "--stride", 4, "--unit", " the")
    code, out, _ = isophase("align", "notes.txt", *options, "--json", "found.json")
    assert code == 0
    assert "not at a strong phase: 0 of 15 spans" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["misplaced"], found["out"], found["stride_tokens"]) == (0, "notes.aligned.txt", 4)
    assert (tmp_path / "notes.txt").read_bytes() == LINES
    assert (tmp_path / "notes.aligned.txt").read_bytes() != LINES
    assert isophase("align", "notes.aligned.txt", "--undo", "--out", "back.txt")[0] == 0
    assert (tmp_path / "back.txt").read_bytes() == LINES
    assert isophase("align", "notes.aligned.txt", "--undo")[0] == 0
    assert (tmp_path / "notes.aligned.txt").read_bytes() == LINES
    assert not (tmp_path / "notes.aligned.txt.align.json").exists()


def test_in_place_and_killed_in_between(isophase, tmp_path, words_folder, monkeypatch):
    options = ("--tokenizer", words_folder, "--stride", 4, "--unit", " the")
    assert isophase("align", "notes.txt", *options, "--out", "notes.txt")[0] == 0
    again = isophase("align", "notes.txt", *options, "--out", "notes.txt")
    assert (again[0], len(again[2].splitlines())) == (2, 1)
    assert "--undo" in again[2]
    assert isophase("align", "notes.txt", "--undo")[0] == 0
    assert (tmp_path / "notes.txt").read_bytes() == LINES

    written = align_file.write_atomically

    def dies_behind_the_record(path, data):
        if path.suffix != ".json":
            raise OSError(28, "no space left")
        written(path, data)

    monkeypatch.setattr(align_file, "write_atomically", dies_behind_the_record)
    assert "no space left" in isophase("align", "notes.txt", *options, "--out", "notes.txt")[2]
    monkeypatch.undo()
    os.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["isophase", "align", "notes.txt", "--undo"])
    main_code = _code()
    assert main_code == 0
    assert (tmp_path / "notes.txt").read_bytes() == LINES


def _code() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_target_brings_tokenizer_and_stride(isophase):
    pytest.importorskip("torch")
    code, out, _ = isophase("align", "notes.txt", "--target", "isophase:w8s8", "--unit", " the")
    assert code == 0, out
    assert "stride 8" in out


def test_the_curve_of_an_audit(isophase, tmp_path, words_folder):
    run = ("planted:period=4,amplitude=.4,accuracy=.5", "--stride", 4, "--items", 24, "--records", 6)
    code, _, err = isophase("audit", *run, "--length", 220, "--probe", "records", "--control", "none", "--out", "run")
    assert code in (0, 10, 11), err
    code, out, err = isophase(
        "align", "notes.txt", "--curve", "run", "--tokenizer", words_folder, "--unit", " the", "--mark", r"\?"
    )
    assert code == 0, err
    assert "stride 4" in out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["axis_tokens"] == 4
    code, _, err = isophase("align", "notes.txt", "--curve", "run", "--stride", 5, "--tokenizer", words_folder)
    assert (code, "4 phases and the stride is 5" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("notes.txt", "--stride", 4), "none is known"),
        (("notes.txt", "--tokenizer", "WORDS"), "no stride"),
        (("notes.txt", "--tokenizer", "WORDS", "--stride", 0), "the stride is 0"),
        (("notes.txt", "--tokenizer", "WORDS", "--stride", 4, "--format", "yaml"), "unknown"),
        (("notes.txt", "--tokenizer", "WORDS", "--stride", 4, "--format", "json"), "no JSON"),
        (("notes.txt", "--tokenizer", "WORDS", "--stride", 4, "--mark", "("), "regular expression"),
        (("notes.txt", "--tokenizer", "WORDS", "--stride", 4, "--out", "."), "is a folder"),
        (("notes.txt", "--tokenizer", "WORDS", "--curve", "nowhere"), "cannot read"),
        (("notes.txt", "--tokenizer", "WORDS", "--curve", "notes.txt"), "no report"),
        (("notes.txt", "--undo"), "no record"),
        (("nowhere.txt", "--tokenizer", "WORDS", "--stride", 4), "cannot read"),
        (("binary.txt", "--tokenizer", "WORDS", "--stride", 4), "no UTF-8"),
    ],
)
def test_faults_are_one_line(isophase, tmp_path, words_folder, arguments, says):
    (tmp_path / "binary.txt").write_bytes(b"\xff\x00")
    code, _, err = isophase("align", *(words_folder if a == "WORDS" else a for a in arguments))
    assert (code, len(err.splitlines())) == (2, 1), err
    assert says in err


def test_a_file_that_was_changed_is_not_undone(isophase, tmp_path, words_folder):
    isophase("align", "notes.txt", "--tokenizer", words_folder, "--stride", 4, "--unit", " the")
    changed = tmp_path / "notes.aligned.txt"
    changed.write_text(changed.read_text() + "more")
    code, _, err = isophase("align", "notes.aligned.txt", "--undo")
    assert (code, "changed since" in err) == (2, True)


def test_neither_remedy_loads_torch():
    code = """
import sys
import isophase.cli.align, isophase.cli.serve, isophase.mitigate.align.target
import isophase.mitigate.vote.rules, isophase.mitigate.vote.shifts, isophase.mitigate.proxy.serve
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
