"""Accuracy by phase before and after alignment, and the tokens that alignment adds.

    python bench/align.py --model w8s8 --items 64

A document is 14 records of 16 to 24 tokens (key, value, filler) behind 0 to 7 tokens of filler, so that the queried
record meets every phase. The curve that alignment goes by is measured on other documents. Every document is asked as
it is and aligned; accuracies are by the phase that the queried record had before. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import transformers

from isophase.mitigate.align.plan import Span, align
from isophase.probes import Prompt
from isophase.probes.styles import pick_style
from isophase.statistics import wilson
from isophase.targets.bundled import open_bundled
from isophase.targets.huggingface import HuggingFaceTarget

RECORDS = 14
RECORD_TOKENS = (16, 24)


class Document(NamedTuple):
    """A prompt and the spans of its records."""

    prompt: Prompt
    spans: list[Span]


def documents(target: HuggingFaceTarget, items: int, stride: int, seed: int) -> list[Document]:
    """`items` sets of records, each behind 0 to `stride - 1` tokens of filler."""
    style = pick_style("pairs", target.tokenizer).resolve(target.tokenizer)
    made = []
    for item in range(items):
        rng = np.random.default_rng([seed, item])
        keys = rng.choice(style.key_words, RECORDS, replace=False)
        values = rng.choice(style.value_words, RECORDS, replace=False)
        lengths = rng.integers(RECORD_TOKENS[0], RECORD_TOKENS[1] + 1, RECORDS)
        bodies = [np.array([k, v, *style.filler(rng, n - 2)]) for k, v, n in zip(keys, values, lengths, strict=True)]
        asked = int(rng.integers(2, RECORDS - 2))  # neither at the very start nor in the local window
        question = style.question.fill(keys[asked : asked + 1, None], values[asked : asked + 1, None])[0]
        lead = style.filler(rng, stride - 1)
        for column in range(stride):
            head = np.concatenate([style.prologue, lead[:column]])
            starts = len(head) + np.concatenate([[0], np.cumsum(lengths)[:-1]])
            prompt = Prompt(
                ids=np.concatenate([head, *bodies, question]).astype(np.int32),
                answer_ids=(int(values[asked]),),
                item=item,
                column=column,
                position_tokens=int(starts[asked]),
                span_tokens=2,
            )
            made.append(Document(prompt, [Span(int(s), int(n)) for s, n in zip(starts, lengths, strict=True)]))
    return made


def aligned(target: HuggingFaceTarget, document: Document, curve: Sequence[float], seed: int) -> Prompt:
    """The prompt with neutral tokens where the plan puts them."""
    style = pick_style("pairs", target.tokenizer).resolve(target.tokenizer)
    prompt = document.prompt
    plan = align(document.spans, len(curve), curve)
    rng = np.random.default_rng([seed, prompt.item, prompt.column])
    ids, at = [], 0
    for insertion in plan.insertions:
        ids += [prompt.ids[at : insertion.at_tokens], style.filler(rng, insertion.tokens)]
        at = insertion.at_tokens
    moved = dict(zip((span.start_tokens for span in document.spans), plan.starts_tokens, strict=True))
    return Prompt(
        ids=np.concatenate([*ids, prompt.ids[at:]]).astype(np.int32),
        answer_ids=prompt.answer_ids,
        item=prompt.item,
        column=prompt.column,
        position_tokens=moved[prompt.position_tokens],
        span_tokens=prompt.span_tokens,
    )


def by_phase(target: HuggingFaceTarget, prompts: list[Prompt], phases: list[int], stride: int) -> list[list[float]]:
    """Accuracy at each phase with its interval: [stride][accuracy, low, high]."""
    correct = np.array([answer.correct for answer in target.answer(prompts)])
    rows = []
    for phase in range(stride):
        chosen = correct[np.array(phases) == phase]
        low, high = wilson(int(chosen.sum()), len(chosen))
        rows.append([round(float(x), 3) for x in (chosen.mean(), low, high)])
    return rows


def measure(model: str, items: int, seed: int = 0) -> dict[str, object]:
    """All figures of one bundled model."""
    target = open_bundled(model)
    stride = target.grids[0].stride_tokens
    other = [document.prompt for document in documents(target, items, stride, seed + 1)]
    curve = [row[0] for row in by_phase(target, other, [p.position_tokens % stride for p in other], stride)]
    asked = documents(target, items, stride, seed)
    phases = [document.prompt.position_tokens % stride for document in asked]
    before = by_phase(target, [document.prompt for document in asked], phases, stride)
    moved = [aligned(target, document, curve, seed) for document in asked]
    after = by_phase(target, moved, phases, stride)
    tokens = sum(len(document.prompt.ids) for document in asked)
    added = sum(len(prompt.ids) for prompt in moved) - tokens
    return {
        "model": model,
        "stride_tokens": stride,
        "documents": len(asked),
        "curve": curve,
        "by_phase_before": before,
        "by_phase_after": after,
        "gap_points_before": round(100 * (max(before)[0] - min(before)[0]), 1),
        "gap_points_after": round(100 * (max(after)[0] - min(after)[0]), 1),
        "added_percent": round(100 * added / tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="w8s8")
    parser.add_argument("--items", type=int, default=64)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    for name, value in measure(arguments.model, arguments.items).items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
