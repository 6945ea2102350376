"""A real vLLM on the CPU, serving SmolLM2-135M: `make vllm-cpu` makes its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import isophase
from isophase.audit.run import load_run
from isophase.audit.store import read_answers
from isophase.errors import EXIT_UNREACHABLE
from isophase.probes import ProbeSettings, build_probe
from isophase.targets.huggingface import HuggingFaceTarget
from isophase.targets.server.target import Question, ServerTarget

pytestmark = pytest.mark.slow

ITEMS, WINDOW = 14, 16
SIZES = ("--items", ITEMS, "--window", WINDOW, "--records", 4, "--length", 112, "--demonstrations", 1)


@pytest.fixture
def audit(vllm, tmp_path):
    """Start an audit of the server as a process."""

    def start() -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "isophase.cli.main",
            "audit",
            vllm.spec,
            *map(str, SIZES),
            "--concurrency",
            "8",
        ]
        command += ["--out", str(tmp_path / "run"), "--json", str(tmp_path / "report.json")]
        environment = os.environ | {"PYTHONPATH": str(Path(isophase.__file__).parents[1])}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    return start


def test_it_says_what_it_is_and_echoes_what_it_reads(vllm):
    target = ServerTarget(vllm.spec)
    about = target.describe()
    assert (about["server"], about["version"], about["sends_ids"]) == ("vllm", "0.32.0", True)
    assert about["notes"] == []
    assert target.max_length_tokens == 4095
    assert target.control_periods == (128,)
    ids = target.tokenizer.encode("The code of the cellar is 48213. The code of the")
    (reply,) = target.replies([Question(ids, 3)])
    assert reply.echoed_ids == tuple(ids)
    assert reply.prompt_tokens == len(ids)
    assert len(reply.output_ids) == 3
    assert len(reply.alternatives) == 3
    assert len(reply.alternatives[0]) >= 20


def test_log_probabilities_are_those_of_the_model(vllm, smollm2_folder):
    """From the alternatives beside an answer, and by teacher forcing where the answer is not among them."""
    settings = ProbeSettings(
        probe="records", items=2, records=3, length_tokens=96, window_tokens=4, demonstrations=1, seed=0
    )
    target, local = ServerTarget(vllm.spec), HuggingFaceTarget(str(smollm2_folder), dtype=torch.float32)
    asked = list(build_probe(settings, target.tokenizer))[:6]
    unlikely = tuple(target.tokenizer.encode(" zebra quartz"))
    asked += [replace(prompt, answer_ids=unlikely) for prompt in asked[:3]]
    for found, expected in zip(target.answer(asked), local.answer(asked), strict=True):
        assert found.correct == expected.correct
        assert found.log_probability == pytest.approx(expected.log_probability, abs=2e-3)


def test_an_audit_survives_its_server_and_agrees_with_the_model_itself(vllm, audit, tmp_path, smollm2_folder):
    rows = ITEMS * WINDOW
    assert rows >= 200
    answers = tmp_path / "run" / "answers.jsonl"
    with audit() as first:
        while not answers.exists() or answers.read_bytes().count(b"\n") < rows // 4:
            assert first.poll() is None, first.communicate()
            time.sleep(0.2)
        vllm.kill()
        _, error = first.communicate(timeout=120)
    vllm.start()
    assert first.returncode == EXIT_UNREACHABLE, error
    assert "the run resumes" in error
    kept, _ = read_answers(tmp_path / "run")
    assert rows // 4 <= len(kept) < rows
    assert {answer.status for answer in kept.values()} == {"ok"}

    with audit() as second:
        _, error = second.communicate()
    assert second.returncode in (0, 10, 11), error
    written = Counter(json.loads(line)["row"] for line in answers.read_text().splitlines())
    assert written == Counter(range(rows))
    plan, found, manifest = load_run(tmp_path / "run")
    assert manifest["resumed"] is True
    assert {row: found[row] for row in kept} == kept
    # Wrong ids echoed would be errors.
    assert {answer.status for answer in found.values()} <= {"ok", "wrong_format"}
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0 <= report["flips"] <= report["repeats"]
    assert report["repeats"] > 0

    local = HuggingFaceTarget(str(smollm2_folder), dtype=torch.float32)
    probe = build_probe(plan.parts[0].probe, local.tokenizer)
    same = [
        found[row].output_ids == answer.output_ids and found[row].correct == answer.correct
        for row, answer in enumerate(local.answer(list(probe)))
    ]
    assert np.mean(same) >= 0.99
