"""Sparse prefill against torch's dense attention: speed, recall, whole models, phases, and the offline search.

    python bench/prefill.py speed --lengths 2048 4096 8192 16384 32768 --rounds 5
    python bench/prefill.py speed --lengths 131072 --rounds 1 --kv-heads 1
    python bench/real_models.py smollm2 FOLDER
    python bench/prefill.py frontier FOLDER --tokens 8192
    python bench/prefill.py model FOLDER --lengths 4096 8192
    python bench/prefill.py needle FOLDER --lengths 4000 8000
    python bench/prefill.py phase
    python bench/prefill.py search FOLDER --tokens 4096

Both sides run in turns in one process. speed: 9 query heads and 3 KV heads unless said, 64 wide, float32, planted
structure; the time of ours holds everything: looking, choosing, attending. Recall is measured afterwards, on queries
that were not looked at. From 65,536 tokens on, the heads of each KV head are run in turns, since a dense round takes
minutes. model and needle: `--threshold 512` reads sparsely also where it does not pay.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from isophase.prefill import (
    Adaptive,
    AShape,
    Auto,
    BlockSparse,
    Geometry,
    Pattern,
    Sampling,
    Settings,
    Table,
    VerticalSlash,
    attend_row,
    costs_of,
    look,
)
from prefill_inputs import captured, load, peak_bytes, planted, recall_of, show, spread, text_ids
from prefill_quality import model, needle, phase, search_bench

FIXED: tuple[Pattern, ...] = (
    VerticalSlash(columns=256, slash_tokens=512), VerticalSlash(columns=512, slash_tokens=1024),
    VerticalSlash(columns=1024, slash_tokens=2048), VerticalSlash(columns=2048, slash_tokens=4096),
    BlockSparse(windows=16), BlockSparse(windows=32), BlockSparse(windows=64),
    BlockSparse(windows=16, overlap=1), BlockSparse(windows=32, overlap=1), BlockSparse(windows=64, overlap=1),
    AShape(local_tokens=1024), AShape(local_tokens=4096),
)  # fmt: skip
TARGETS = (0.8, 0.9, 0.95, 0.98)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, enable_gqa=True
    )[0]


def timed(do: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds by the clock, seconds of processor time, and bytes by which memory rose at its peak."""
    before = peak_bytes(reset=True)
    began, worked = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - began, time.process_time() - worked, peak_bytes() - before


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Planted structure at every length, index estimation included."""
    costs, sampling, out = costs_of(64, torch.float32), Sampling(), []
    settings = Settings(policy=Auto(mode=Adaptive(target_recall=options.target)), sampling=sampling, costs=costs)
    threshold = costs.threshold_tokens()
    for tokens in options.lengths:
        kv_heads = options.kv_heads
        query, key, value = planted(tokens, seed=options.seed, heads=3 * kv_heads, kv_heads=kv_heads)
        groups = [slice(0, kv_heads)] if tokens < 65_536 else [slice(n, n + 1) for n in range(kv_heads)]

        def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int = tokens) -> torch.Tensor:
            if tokens < threshold:
                return dense(query, key, value)
            return attend_row(query, key, value, settings)[0]

        rounds: list[list[list[float]]] = []
        for number in range(options.rounds + (tokens < 65_536)):  # the first one warms up
            total = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
            for kv in groups:
                part = (query[kv.start * 3 : kv.stop * 3], key[kv], value[kv])
                # The order changes from round to round.
                for side in (0, 1) if number % 2 else (1, 0):
                    took, worked, rose = timed(lambda side=side, part=part: (ours if side else dense)(*part))
                    was = total[side]
                    total[side] = [was[0] + took, was[1] + worked, max(was[2], rose)]
            if number or tokens >= 65_536:
                rounds.append(total)
        geometry = settings.geometry(tokens, 0, torch.device("cpu"))
        read = [None] * len(query) if tokens < threshold else [c.reads for c in look(query, key, settings, geometry)]
        recalls, densities = recall_of(read, query, key, geometry)
        out.append(show({
            "tokens": tokens, "times_faster": spread([r[0][0] / r[1][0] for r in rounds]),
            "times_less_processor_time": spread([r[0][1] / r[1][1] for r in rounds]),
            "dense_s": spread([r[0][0] for r in rounds]), "ours_s": spread([r[1][0] for r in rounds]),
            "recall": round(statistics.fmean(recalls), 4),
            "worst_head": round(min(recalls), 4), "density": round(statistics.fmean(densities), 4),
            "read": "dense" if tokens < threshold else "sparse", "threshold": threshold,
            "peak_mib_dense": round(max(r[0][2] for r in rounds) / 2**20),
            "peak_mib_ours": round(max(r[1][2] for r in rounds) / 2**20),
        }))  # fmt: skip
    return out


def frontier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Recall against speed for fixed patterns and the adaptive mode, on a real model's queries and keys."""
    model, tokenizer = load(options.folder, options.tokens)
    ids = text_ids(tokenizer, options.tokens)
    layers = list(range(0, model.config.num_hidden_layers, options.every))
    with captured(model, layers) as inputs:
        model(ids, logits_to_keep=1, use_cache=False)
    del model
    geometry = Geometry(tokens=options.tokens)
    policies: dict[str, Any] = {f"adaptive {t}": Auto(mode=Adaptive(target_recall=t)) for t in TARGETS}
    policies |= {repr(p).replace(f", name='{p.name}'", ""): Table(layers=[[p]]) for p in FIXED}
    out = []
    for name, policy in policies.items():
        settings = Settings(policy=policy, sampling=Sampling(), costs=None)
        ratios, recalls, densities = [], [], []
        for query, key, value in inputs.values():
            _, base, _ = timed(lambda q=query, k=key, v=value: dense(q, k, v))
            _, took, _ = timed(lambda q=query, k=key, v=value, s=settings: attend_row(q, k, v, s))
            ratios.append(base / took)
            found = recall_of([c.reads for c in look(query, key, settings, geometry)], query, key, geometry, 128)
            recalls += found[0]
            densities += found[1]
        worst = sorted(recalls)[len(recalls) // 10]
        out.append(show({
            "policy": name, "tokens": options.tokens, "layers": len(layers),
            "recall": round(statistics.fmean(recalls), 4), "worst_tenth": round(worst, 4),
            "density": round(statistics.fmean(densities), 4),
            "times_less_processor_time": spread(ratios),
        }))  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    runs = {
        "speed": speed,
        "frontier": frontier,
        "model": model,
        "needle": needle,
        "phase": phase,
        "search": search_bench,
    }
    for name in runs:
        part = parts.add_parser(name)
        part.add_argument("--json", type=Path)
        part.add_argument("--seed", type=int, default=0)
        if name not in ("speed", "phase"):
            part.add_argument("folder")
        if name in ("speed", "model", "needle"):
            part.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
            part.add_argument("--rounds", type=int, default=3)
        if name == "speed":
            part.add_argument("--target", type=float, default=0.95)
            part.add_argument("--kv-heads", type=int, default=3, help="each with three query heads")
        if name in ("model", "needle"):
            part.add_argument("--targets", type=float, nargs="+", default=[0.95, 0.99])
            part.add_argument("--threshold", type=int, help="shortest prompt that is read sparsely; default: measured")
        if name == "needle":
            part.add_argument("--depths", type=int, default=5)
            part.add_argument("--phases", type=int, default=2)
        if name in ("frontier", "search"):
            part.add_argument("--tokens", type=int, default=8192 if name == "frontier" else 4096)
            part.add_argument("--every", type=int, default=3, help="look at every so many layers")
        if name == "search":
            part.add_argument("--budget", type=float, default=0.25)
        if name == "phase":
            part.add_argument("--tokens", type=int, default=4096)
            part.add_argument("--items", type=int, default=40)
            part.add_argument("--windows", type=int, default=4)
            part.add_argument("--strength", type=float, default=5.0)
    options = parser.parse_args()
    facts = {
        "torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine(),
        "threads": torch.get_num_threads(), **vars(options), "json": None,
    }  # fmt: skip
    print(json.dumps(facts, default=str), flush=True)
    with torch.inference_mode():
        found = runs[options.part](options)
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "found": found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
