"""Training speed of every kind of compression against full attention: tokens per second, same sizes, one run.

    python bench/train.py                          the bundled size, and one four times as wide
    python bench/train.py --only bundled --rounds 9 --threads 1

Models of a size read the same batches and take turns: each round times one optimiser step of every model
(after two untimed ones), so that whatever else the machine does hits all of them. The ratio to full
attention is taken per round; median and range are printed. Every length and batch holds the same number of
tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from isophase.lab.train.recipe import Recipe, read_recipe
from isophase.lab.train.run import build_model, train_step

RECIPES = Path(__file__).parents[1] / "recipes"
SIZES: dict[str, dict[str, Any]] = {
    "bundled": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32},
    "wide": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32},
}
LENGTHS = (128, 512, 2048)
TOKENS = 4096
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "W4/S4": {"compression_window": 4, "compression_stride": 4},
    "W8/S4": {"compression_window": 8, "compression_stride": 4},
    "W8/S8": {"compression_window": 8, "compression_stride": 8},
    "W8/S8 uniform": {"compression_window": 8, "compression_stride": 8, "gate": "uniform"},
    "W8/S8 vector": {"compression_window": 8, "compression_stride": 8, "gate": "vector"},
    "W8/S8 shared slots": {"compression_window": 8, "compression_stride": 8, "slot_parameters": "shared"},
    "W32/S16": {"compression_window": 32, "compression_stride": 16},
}


def recipe(kind: str, size: str, length: int) -> Recipe:
    """The bundled recipe with another memory and size."""
    settings = {**SIZES[size], **KINDS[kind], "max_position_embeddings": length}
    return read_recipe(RECIPES / "full.yaml", tuple(f"model.{name}={value}" for name, value in settings.items()))


def measure(size: str, length: int, rounds: int) -> dict[str, object]:
    """Time every kind at one size and length."""
    steppers = {}
    for kind in KINDS:
        chosen = recipe(kind, size, length)
        model = build_model(chosen)
        steppers[kind] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 2):
        ids = rng.integers(4, 64, size=(TOKENS // length, length))
        for kind, (model, optimiser) in steppers.items():
            began = time.perf_counter()
            train_step(model, optimiser, ids, ids, 1.0)
            if number >= 2:
                seconds[kind].append(time.perf_counter() - began)
    figures: dict[str, object] = {"size": size, "length_tokens": length, "sequences": TOKENS // length}
    for kind, times in seconds.items():
        ratios = [full / own for full, own in zip(seconds["full"], times, strict=True)]
        figures[kind] = {
            "tokens_per_second": round(TOKENS / statistics.median(times)),
            "of_full_attention": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads, "
        f"{platform.processor() or platform.machine()}, {arguments.rounds} rounds, {TOKENS} tokens a step"
    )
    for size in SIZES if arguments.only is None else (arguments.only,):
        for length in LENGTHS:
            print(json.dumps(measure(size, length, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
