"""`transformers serve` as an audit's target: a real server that takes text only and gives no log-probabilities."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from running_transformers import transformers_serve

import isophase
from isophase.audit.run import load_run
from isophase.probes import build_probe
from isophase.targets.huggingface import HuggingFaceTarget

pytest.importorskip("fastapi")


@pytest.mark.slow
def test_an_audit(smollm2_folder, tmp_path):
    sizes = ("--items", 4, "--window", 8, "--records", 4, "--length", 112, "--demonstrations", 1)
    with transformers_serve(smollm2_folder, tmp_path / "serve.log") as url:
        command = [sys.executable, "-m", "isophase.cli.main", "audit", f"{url}#{smollm2_folder}", *map(str, sizes)]
        done = subprocess.run(
            [*command, "--concurrency", "2", "--tokenizer", smollm2_folder, "--out", tmp_path / "run", "--json", "-"],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(Path(isophase.__file__).parents[1])},
        )
    assert done.returncode in (0, 10, 11), done.stderr
    report = json.loads(done.stdout)
    plan, answers, manifest = load_run(tmp_path / "run")
    (facts,) = manifest["parts"].values()
    assert (facts["server"], facts["sends_ids"]) == ("openai", False)
    assert sorted(answers) == list(range(32))
    assert {answer.status for answer in answers.values()} <= {"ok", "wrong_format"}
    assert all(math.isnan(answer.log_probability) for answer in answers.values())
    assert {answer.repeat_agrees for answer in answers.values()} <= {None, True}
    local = HuggingFaceTarget(str(smollm2_folder), dtype=torch.float32)
    prompts = list(build_probe(plan.parts[0].probe, local.tokenizer))
    # A full stop and the comma behind it become one token where the server reads the text: it is counted, and said.
    texts = [local.tokenizer.decode(prompt.ids) for prompt in prompts]
    moved = sum(len(local.tokenizer.encode(text)) != 112 for text in texts)
    notes = " ".join(report["notes"])
    assert "Phase unverified" in notes
    found = re.search(r"(\d+) of (\d+) prompts had another length", notes)
    assert int(found[2]) == len(prompts) + report["repeats"]
    assert moved <= int(found[1]) <= moved + report["repeats"] < len(prompts)
    expected = list(local.answer(prompts))
    assert np.mean([answers[row].correct == answer.correct for row, answer in enumerate(expected)]) >= 0.9
    assert any(answer.correct for answer in answers.values())
