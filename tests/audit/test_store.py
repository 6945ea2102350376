from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isophase.audit.analyse import build_report
from isophase.audit.plan import make_plan
from isophase.audit.run import plan_for, run_plan
from isophase.audit.store import RunFolder, decode_answer, encode_answer, read_answers, read_plan
from isophase.errors import EXIT_USAGE, IsophaseError
from isophase.targets import open_target
from isophase.targets.base import Answer

numbers = st.floats(max_value=0, allow_nan=False, allow_infinity=False)


@st.composite
def answers(draw):
    status = draw(st.sampled_from(["ok", "wrong_format", "truncated", "error"]))
    return Answer(
        status=status,
        correct=status == "ok" and draw(st.booleans()),
        log_probability=draw(numbers | st.just(math.nan)),
        output_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))),
        choice_log_probabilities=tuple(draw(st.lists(numbers, max_size=3))),
        detail=draw(st.text(max_size=30)),
    )


@given(row=st.integers(0, 10**9), answer=answers())
def test_answers_round_trip_in_one_line(row, answer):
    line = encode_answer(row, answer)
    assert line.endswith(b"\n")
    assert len(line.splitlines()) == 1
    again, decoded = decode_answer(json.loads(line))
    assert (again, repr(decoded)) == (row, repr(answer))
    assert encode_answer(again, decoded) == line


def some_answers(count=4):
    return [(row, Answer(status="ok", correct=row % 2 == 0, log_probability=-row / 3)) for row in range(count)]


@pytest.fixture
def plan(settings):
    return make_plan(settings(), cache(open_target), pilot=False)


def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path, plan):
    with RunFolder(tmp_path, plan) as folder:
        folder.append(some_answers())
    path = tmp_path / "answers.jsonl"
    raw = path.read_bytes()
    last = len(raw.splitlines()[-1]) + 1
    for kept in range(last):
        path.write_bytes(raw[: len(raw) - last + kept])
        found, whole = read_answers(tmp_path)
        assert sorted(found) == [0, 1, 2]
        assert whole == len(raw) - last
        with RunFolder(tmp_path, plan) as folder:
            assert sorted(folder.answers) == [0, 1, 2]
            folder.append(some_answers()[3:])
        assert path.read_bytes() == raw


@pytest.mark.parametrize("damage", [b"\0" * 20 + b"\n", b"{}\n", b"[]\n", b'{"row":1}\n', b"\xff\n", b"\n"])
def test_a_damaged_line_in_the_middle_is_an_error(tmp_path, plan, damage):
    with RunFolder(tmp_path, plan) as folder:
        folder.append(some_answers())
    path = tmp_path / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], damage, *lines[2:]]))
    before = path.read_bytes()
    with pytest.raises(IsophaseError, match=r"answers.jsonl line 2 is damaged .*not the last"):
        RunFolder(tmp_path, plan)
    assert path.read_bytes() == before


def test_an_unknown_status_is_damage(tmp_path, plan):
    with RunFolder(tmp_path, plan) as folder:
        folder.append(some_answers())
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"ok"', b'"fine"', 1))
    with pytest.raises(IsophaseError, match=r"line 1 is damaged \(unknown status 'fine'\)"):
        read_answers(tmp_path)


def test_foreign_folder_is_refused_and_left_alone(tmp_path, plan, settings):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(IsophaseError, match=r"not empty and not a run folder \(it holds 'thesis.tex'\)"):
        RunFolder(tmp_path, plan)
    # The same before a pilot asks anything.
    with pytest.raises(IsophaseError, match="not a run folder"):
        plan_for(settings(), tmp_path, opener_that_must_not_be_used)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def opener_that_must_not_be_used(spec):
    raise AssertionError(spec)


def test_another_plan_is_refused_and_named(tmp_path, plan, settings):
    RunFolder(tmp_path, plan).__exit__(None, None, None)
    other = make_plan(settings(seed=1), cache(open_target), pilot=False)
    with pytest.raises(IsophaseError, match="another plan"):
        RunFolder(tmp_path, other)
    with pytest.raises(IsophaseError, match=r"another plan \(seed is 0 there and 1 here\)"):
        plan_for(settings(seed=1), tmp_path, opener_that_must_not_be_used)
    assert plan_for(settings(), tmp_path, opener_that_must_not_be_used) == plan
    assert read_plan(tmp_path) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2; this isophase reads up to 1. Upgrade isophase."),
        ({"schema_version": None}, "schema version None"),
        ({"parts": 3}, "damaged: parts"),
    ],
)
def test_newer_or_damaged_plan(tmp_path, plan, settings, change, message):
    RunFolder(tmp_path, plan).__exit__(None, None, None)
    raw = json.loads((tmp_path / "plan.json").read_text()) | change
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    for attempt in (lambda: read_plan(tmp_path), lambda: RunFolder(tmp_path, plan)):
        with pytest.raises(IsophaseError, match=message):
            attempt()
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(IsophaseError, match="damaged"):
        read_plan(tmp_path)


@pytest.mark.parametrize("place", ["file/run", "file", "/proc/isophase"])
def test_unwritable_folder(tmp_path, plan, settings, place):
    (tmp_path / "file").write_text("")
    folder = tmp_path / place  # an absolute place replaces tmp_path
    with pytest.raises(IsophaseError, match=r"cannot write to .*Choose another --out") as caught:
        RunFolder(folder, plan)
    assert caught.value.exit_code == EXIT_USAGE


def test_folder_in_use_by_another_process(tmp_path, plan):
    script = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    RunFolder(tmp_path, plan).__exit__(None, None, None)
    command = [sys.executable, "-c", script, str(tmp_path / "answers.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(IsophaseError, match="in use by another process"):
            RunFolder(tmp_path, plan)
        other.communicate()
    RunFolder(tmp_path, plan).__exit__(None, None, None)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB and a function that makes it large."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root may mount")

    def enlarge():
        subprocess.run(["mount", "-o", "remount,size=16m", str(mount)], check=True)

    yield mount, enlarge
    subprocess.run(["umount", str(mount)], check=True)


def test_full_disk_loses_nothing_and_resumes(small_disk, run, settings, monkeypatch, tokenizer_of):
    monkeypatch.setattr("isophase.audit.run._FLUSH_SECONDS", 0.0)
    mount, enlarge = small_disk
    chosen = settings(items=120, length_tokens=128)
    plan, calm = run(chosen, "calm")
    expected = (calm / "answers.jsonl").read_bytes()
    assert len(expected) > 65_536
    opener = cache(open_target)
    with pytest.raises(IsophaseError, match=r"the disk of .* is full. Free some space and repeat") as caught:
        run_plan(plan, mount / "run", opener)
    assert caught.value.exit_code == EXIT_USAGE
    kept = (mount / "run" / "answers.jsonl").read_bytes()
    assert kept
    assert kept.endswith(b"\n")
    assert expected.startswith(kept)
    with pytest.raises(IsophaseError, match="not complete"):
        build_report(mount / "run", tokenizer_of)
    enlarge()
    run_plan(plan, mount / "run", opener)
    assert (mount / "run" / "answers.jsonl").read_bytes() == expected


class Failing:
    """A file whose disk fills up in the middle of a write."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 77, 150])
def test_half_a_write_is_taken_back(tmp_path, plan, room):
    with RunFolder(tmp_path, plan) as folder:
        folder.append(some_answers()[:1])
        before = (tmp_path / "answers.jsonl").read_bytes()
        whole, folder._file = folder._file, Failing(folder._file, room)
        with pytest.raises(IsophaseError, match="full"):
            folder.append(some_answers()[1:])
        assert (tmp_path / "answers.jsonl").read_bytes() == before
        assert sorted(folder.answers) == [0]
        folder._file = whole
        folder.append(some_answers()[1:])
    assert sorted(read_answers(tmp_path)[0]) == [0, 1, 2, 3]


def test_file_size_limit_is_one_line(tmp_path):
    """Without root: the shell's file size limit stands for the full disk."""
    program = Path(sys.executable), "-m", "isophase.cli.main"
    command = [*map(str, program), "audit", "planted:", "--items", "40", "--out", str(tmp_path / "run")]
    shell = f"trap '' XFSZ; ulimit -f 8; exec {' '.join(command)}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_USAGE
    assert len(done.stderr.splitlines()) == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
