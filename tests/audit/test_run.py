from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache

import pytest

from isophase.audit.plan import make_plan
from isophase.audit.run import load_run, run_plan
from isophase.audit.store import read_answers
from isophase.errors import IsophaseError
from isophase.targets import open_target
from isophase.targets.planted import PlantedTarget


class Counting:
    """Counts questions."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def answer(self, prompts):
        self.asked += [(prompt.item, prompt.column) for prompt in prompts]
        return self.inner.answer(prompts)


def test_a_run_asks_every_row_once_and_a_complete_one_nothing(run, settings):
    target = Counting(PlantedTarget())
    plan, folder = run(settings("a"), opener=lambda spec: target)
    assert sorted(target.asked) == [(item, column) for item in range(8) for column in range(8)]
    assert target.asked != sorted(target.asked)
    run_plan(plan, folder, lambda spec: target)
    assert len(target.asked) == 64
    read_plan, answers, manifest = load_run(folder)
    assert (read_plan, sorted(answers)) == (plan, list(range(64)))
    assert manifest["rows"] == 64
    assert manifest["statuses"] == {"ok": 64}
    assert manifest["resumed"] is False


@pytest.mark.parametrize("lines", [0, 1, 40, 64])
def test_resume_asks_only_what_is_missing(run, settings, lines):
    target = Counting(PlantedTarget())
    plan, folder = run(settings("a"), opener=lambda spec: target)
    path = folder / "answers.jsonl"
    raw = path.read_bytes()
    path.write_bytes(b"".join(raw.splitlines(keepends=True)[:lines]))
    (folder / "manifest.json").unlink()
    before, target.asked = target.asked, []
    run_plan(plan, folder, lambda spec: target)
    assert target.asked == before[lines:]
    assert path.read_bytes() == raw
    assert json.loads((folder / "manifest.json").read_text())["resumed"] is (lines > 0)


@pytest.mark.parametrize("complete", [True, False])
def test_a_changed_model_is_refused(run, settings, complete):
    plan, folder = run(settings("a"), opener=lambda spec: PlantedTarget())
    if not complete:
        (folder / "manifest.json").unlink()
    with pytest.raises(IsophaseError, match=r"a is not the model that the run .* began with"):
        run_plan(plan, folder, lambda spec: PlantedTarget(period=4))


def test_a_fault_of_the_target_keeps_what_was_answered(run, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("isophase.audit.run._FLUSH_SECONDS", 0.0)

    class Breaking(Counting):
        def answer(self, prompts):
            if len(self.asked) == 30:
                raise RuntimeError("out of memory")
            return super().answer(prompts)

    plan = make_plan(settings("a"), lambda spec: PlantedTarget(), pilot=False)
    with pytest.raises(RuntimeError):
        run_plan(plan, tmp_path / "run", lambda spec: Breaking(PlantedTarget()))
    assert len(read_answers(tmp_path / "run")[0]) == 30


COMMAND = [
    "-m",
    "isophase.cli.main",
    "audit",
    "planted:period=8,amplitude=.2,accuracy=.7,noise=.05",
    "--items",
    "16",
]


def test_same_seed_same_bytes_whatever_the_hash_seed(tmp_path):
    """Plan, answers, page and JSON (but for `seconds`), in different processes."""
    processes = []
    for name, seed, hash_seed in (("a", "3", "1"), ("b", "3", "2"), ("c", "4", "1")):
        command = [sys.executable, *COMMAND, "--seed", seed, "--out", str(tmp_path / name)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    assert {process.wait() for process in processes} <= {0, 10, 11}
    for process in processes:
        process.communicate()

    def files(name):
        found = {n: (tmp_path / name / n).read_text() for n in ("plan.json", "answers.jsonl", "report.html")}
        found["report.json"] = re.sub(r'"seconds": [\d.]+', "", (tmp_path / name / "report.json").read_text())
        return found

    assert files("a") == files("b")
    assert all(files("a")[name] != files("c")[name] for name in files("a"))


def test_a_real_model_gives_the_same_bytes_twice(run, settings, tiny_model):
    spec = f"hf:{tiny_model}"
    chosen = settings(spec, records=4, length_tokens=96)
    _, first = run(chosen, "first", cache(open_target))
    _, second = run(chosen, "second", cache(open_target))
    assert (first / "answers.jsonl").read_bytes() == (second / "answers.jsonl").read_bytes()
    assert len(read_answers(first)[0]) == 64
