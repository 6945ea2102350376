"""Memories against full attention and against each other: training and decoding speed, and bytes of the cache.

    python bench/memory.py                         512 to 16,384 tokens
    python bench/memory.py --lengths 512 2048 --rounds 3

Models differ in their memory and in nothing else; they take turns, one step each a round, so whatever else
the machine does hits all of them. Ratios are taken per round, to full attention and to the fixed grid;
median and range are printed. Decoding starts behind a prompt of the given length, one token a step. Bytes
are those of all tensors that the cache holds then: entries, exact keys and values, hidden states of open
chunks, block tables, pages that wait for entries.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
import transformers

from isophase.lab.train import train_step
from isophase.models.compat import cache_argument, cache_of
from isophase.models.config import CompressedQwen3Config
from isophase.models.memory import CompressedLayer
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FIXED = {"compression_window": 8, "compression_stride": 8, "local_window": 11}
CONTENT = {"chunk_rule": "local_maximum", "chunk_groups": 2, "chunk_radius": 4, "chunk_max_tokens": 14}
MEMORIES: dict[str, dict[str, Any]] = {
    "full": {},
    "fixed W8/S8": FIXED,
    "fixed W16/S8": {**FIXED, "compression_window": 16},
    "staggered by heads": {**FIXED, "grid_shift": "heads", "chunk_groups": 2},
    "hash": {**CONTENT, "local_window": 8},
    "hash, overlap 2": {**CONTENT, "local_window": 8, "chunk_overlap": 2},
}
TRAINED_TOKENS = 4096
DECODED = 32


def build(memory: str, length: int) -> CompressedQwen3ForCausalLM:
    torch.manual_seed(0)
    settings = {**SHAPE, **MEMORIES[memory], "max_position_embeddings": length + 4 * DECODED}
    return CompressedQwen3ForCausalLM(CompressedQwen3Config(**settings))


def stored_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            total += layer.stored_bytes()
        else:
            total += layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
    return total


def training(length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one step, by memory and round."""
    generator = torch.Generator().manual_seed(0)
    steppers = {}
    for memory in MEMORIES:
        model = build(memory, length)
        steppers[memory] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    seconds: dict[str, list[float]] = {memory: [] for memory in MEMORIES}
    rows = max(1, TRAINED_TOKENS // length)
    for number in range(rounds + 1):
        ids = torch.randint(0, SHAPE["vocab_size"], (rows, length), generator=generator).numpy()
        for memory, (model, optimiser) in steppers.items():
            began = time.perf_counter()
            train_step(model, optimiser, ids, ids, 1.0)
            if number:
                seconds[memory].append(time.perf_counter() - began)
    return seconds


@torch.inference_mode()
def decoding(length: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of `DECODED` steps, by memory and round, and bytes of the cache behind the prompt."""
    ids = torch.randint(0, SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))
    caches, models, held = {}, {}, {}
    for memory in MEMORIES:
        models[memory] = build(memory, length).eval()
        caches[memory] = cache_of(models[memory](ids, use_cache=True, logits_to_keep=1))
        held[memory] = stored_bytes(caches[memory])
    seconds: dict[str, list[float]] = {memory: [] for memory in MEMORIES}
    for number in range(min(rounds, 3) + 1):
        for memory, model in models.items():
            began = time.perf_counter()
            for step in range(DECODED):
                token = ids[:, (number * DECODED + step) % length, None]
                model(token, use_cache=True, logits_to_keep=1, **cache_argument(caches[memory]))
            if number:
                seconds[memory].append(time.perf_counter() - began)
    return seconds, held


def ratio(mine: list[float], other: list[float]) -> str:
    """How many times the other's speed, median and range over rounds."""
    values = [theirs / own for own, theirs in zip(mine, other, strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-up-to", type=int, default=2048, help="longest sequence to train on")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()}, {arguments.rounds} rounds, {json.dumps(SHAPE)}"
    )
    for length in arguments.lengths:
        trained = training(length, arguments.rounds) if length <= arguments.train_up_to else None
        decoded, held = decoding(length, arguments.rounds)
        for memory in MEMORIES:
            line: dict[str, object] = {"tokens": length, "memory": memory}
            for what, seconds in (("training", trained), ("decoding", decoded)):
                if seconds is None:
                    continue
                line[f"{what}, of full"] = ratio(seconds[memory], seconds["full"])
                line[f"{what}, of fixed W8/S8"] = ratio(seconds[memory], seconds["fixed W8/S8"])
            line["bytes"] = held[memory]
            line["bytes, of fixed W8/S8"] = round(held[memory] / held["fixed W8/S8"], 3)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
