"""Prompts per second of an audit against a plain loop: one prompt per forward pass, no shared prefix.

    python bench/audit.py                          bundled model and SmolLM2 at 2,048 tokens
    python bench/audit.py --only bundled --rounds 5

Both sides answer the same prompts with the same loaded model, in turns within one process, and must
give the same answers, so SmolLM2 is computed in float32: in bfloat16 rounding decides some. The ratio is
taken per round; its median and range are printed. The plain loop is measured twice: as most people write
it (logits of every position), and asking for the logits of the last positions only.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from isophase.probes import ProbeSettings, Prompt, build_probe
from isophase.targets.bundled import open_bundled
from isophase.targets.huggingface import HuggingFaceTarget
from real_models import smollm2

SIZES = {
    "bundled": {"records": 24, "length_tokens": 114, "window_tokens": 24, "items": 8},
    "smollm2": {"records": 16, "length_tokens": 2048, "window_tokens": 24, "items": 1},
}


def plain(target: HuggingFaceTarget, prompts: list[Prompt], last_only: bool) -> list[tuple[bool, float]]:
    """Answer one prompt per forward pass."""
    answers = []
    for prompt in prompts:
        ids = torch.from_numpy(np.concatenate([prompt.ids, prompt.answer_ids[:-1]])).long()[None]
        keep = len(prompt.answer_ids)
        with torch.inference_mode():
            options = {"logits_to_keep": keep} if last_only else {}
            logits = target.model(ids.to(target.device), use_cache=False, **options).logits[0, -keep:].float()
        wanted = torch.tensor(prompt.answer_ids, device=logits.device)
        log_p = torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None]).sum()
        answers.append((bool((logits.argmax(dim=-1) == wanted).all()), float(log_p)))
    return answers


def audit(target: HuggingFaceTarget, prompts: list[Prompt]) -> list[tuple[bool, float]]:
    """Answer as the audit does."""
    return [(answer.correct, answer.log_probability) for answer in target.answer(prompts)]


def timed(run: Callable[[], list[tuple[bool, float]]]) -> tuple[float, list[tuple[bool, float]]]:
    began = time.perf_counter()
    answers = run()
    return time.perf_counter() - began, answers


def measure(name: str, target: HuggingFaceTarget, rounds: int) -> dict[str, object]:
    """Measure one model; prints a line and returns the figures."""
    settings = ProbeSettings(probe="records", seed=0, **SIZES[name])
    prompts = list(build_probe(settings, target.tokenizer))
    audit(target, prompts[: settings.window_tokens])  # warm-up, and the check that the shared prefix is exact
    ratios: dict[str, list[float]] = {"plain": [], "plain, last logits": []}
    rates: list[float] = []
    worst = 0.0
    for _ in range(rounds):
        ours, answers = timed(lambda: audit(target, prompts))
        rates.append(len(prompts) / ours)
        for label, last_only in (("plain", False), ("plain, last logits", True)):
            theirs, expected = timed(lambda last_only=last_only: plain(target, prompts, last_only))
            ratios[label].append(theirs / ours)
            assert [a for a, _ in answers] == [a for a, _ in expected], "the answers differ"
            worst = max(worst, *(abs(a - b) for (_, a), (_, b) in zip(answers, expected, strict=True)))
    figures: dict[str, object] = {
        "model": target.name,
        **SIZES[name],
        "prompts": len(prompts),
        "prompts_per_second": round(statistics.median(rates), 2),
        "largest_log_probability_difference": worst,
    }
    for label, values in ratios.items():
        figures[f"times faster than {label}"] = {
            "median": round(statistics.median(values), 2),
            "range": [round(min(values), 2), round(max(values), 2)],
        }
    figures["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smollm2", type=Path, help="folder of the unpacked model; default: a temporary one")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()}, {arguments.rounds} rounds"
    )
    if arguments.only in (None, "bundled"):
        print(json.dumps(measure("bundled", open_bundled("w8s8"), arguments.rounds), indent=2))
    if arguments.only in (None, "smollm2"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = smollm2(arguments.smollm2 or Path(scratch) / "smollm2")
            target = HuggingFaceTarget(str(folder), dtype=torch.float32)
            print(json.dumps(measure("smollm2", target, arguments.rounds), indent=2))


if __name__ == "__main__":
    main()
