"""Memories against full attention and against each other: training and decoding speed, and bytes of the cache.

    python bench/memory.py                         512 to 16,384 tokens
    python bench/memory.py --lengths 512 2048 --rounds 3
    python bench/memory.py --device cuda --dtype bfloat16 --attention flex_attention

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

from isophase.models.compat import cache_argument, cache_of
from isophase.models.config import CompressedQwen3Config
from isophase.models.memory import CompressedLayer
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

# Layers of SmolLM2-135M, fewer of them: in much smaller ones Python takes longer than arithmetic.
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
FIXED = {"compression_window": 8, "compression_stride": 8, "local_window": 11}
CONTENT = {"chunk_rule": "local_maximum", "chunk_groups": 3, "chunk_radius": 4, "chunk_max_tokens": 14}
MEMORIES: dict[str, dict[str, Any]] = {
    "full": {},
    "fixed W8/S8": FIXED,
    "fixed W16/S8": {**FIXED, "compression_window": 16},
    "staggered by heads": {**FIXED, "grid_shift": "heads", "chunk_groups": 3},
    "hash": {**CONTENT, "local_window": 8},
    "hash, overlap 2": {**CONTENT, "local_window": 8, "chunk_overlap": 2},
}
TRAINED_TOKENS = 2048
DECODED = 32
PREFILLED = 2048  # tokens of one part of the prompt


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and how everything runs."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"

    def build(self, memory: str, length: int) -> CompressedQwen3ForCausalLM:
        """A model with one of the memories, freshly initialised."""
        torch.manual_seed(0)
        settings = {**SHAPE, **MEMORIES[memory], "max_position_embeddings": length + 4 * DECODED}
        model = CompressedQwen3ForCausalLM(CompressedQwen3Config(**settings)).to(self.device, self.dtype)
        model.set_attn_implementation(self.attention)
        return model

    def seconds(self, run: Callable[[], object]) -> float:
        """Time of a call, until the device has finished."""
        self._wait()
        began = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def stored_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            total += layer.stored_bytes()
        else:
            total += layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
    return total


def training(machine: Machine, length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one step, by memory and round; the first round warms up and is not counted."""
    generator = torch.Generator().manual_seed(0)
    steppers = {}
    for memory in MEMORIES:
        model = machine.build(memory, length).train()
        steppers[memory] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    seconds: dict[str, list[float]] = {memory: [] for memory in MEMORIES}
    rows = max(1, TRAINED_TOKENS // length)
    for number in range(rounds + 1):
        ids = torch.randint(0, SHAPE["vocab_size"], (rows, length), generator=generator).to(machine.device)
        for memory, (model, optimiser) in steppers.items():
            elapsed = machine.seconds(partial(step, model, optimiser, ids))
            if number:
                seconds[memory].append(elapsed)
    return seconds


def step(model: CompressedQwen3ForCausalLM, optimiser: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimiser.step()


@torch.inference_mode()
def decoding(machine: Machine, length: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of `DECODED` steps, by memory and round, and bytes of the cache behind the prompt."""
    ids = torch.randint(0, SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))
    ids = ids.to(machine.device)
    caches, models, held = {}, {}, {}
    for memory in MEMORIES:
        models[memory] = machine.build(memory, length).eval()
        caches[memory] = prefill(models[memory], ids)
        held[memory] = stored_bytes(caches[memory])
    seconds: dict[str, list[float]] = {memory: [] for memory in MEMORIES}
    for number in range(min(rounds, 3) + 1):
        new = ids[:, number * DECODED % length :][:, :DECODED]
        for memory, model in models.items():
            elapsed = machine.seconds(partial(decode, model, caches[memory], new))
            if number:
                seconds[memory].append(elapsed)
    return seconds, held


def prefill(model: CompressedQwen3ForCausalLM, ids: torch.Tensor) -> Any:
    """The cache behind a prompt, which is read in parts: masks of a whole long prompt would take gigabytes."""
    cache = None
    for part in ids.split(PREFILLED, dim=1):
        known = {} if cache is None else cache_argument(cache)
        cache = cache_of(model(part, use_cache=True, logits_to_keep=1, **known))
    return cache


def decode(model: CompressedQwen3ForCausalLM, cache: Any, ids: torch.Tensor) -> None:
    for token in ids.split(1, dim=1):
        model(token, use_cache=True, logits_to_keep=1, **cache_argument(cache))


def ratio(mine: list[float], other: list[float]) -> str:
    """How many times the other's speed, median and range over rounds."""
    values = [theirs / own for own, theirs in zip(mine, other, strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-up-to", type=int, default=2048, help="longest sequence to train on")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "flex_attention"))
    arguments = parser.parse_args()
    machine = Machine(device=arguments.device, dtype=getattr(torch, arguments.dtype), attention=arguments.attention)
    where = torch.cuda.get_device_name() if machine.device == "cuda" else platform.processor() or platform.machine()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads, "
        f"{where}, {arguments.dtype}, {arguments.attention}, {arguments.rounds} rounds, {json.dumps(SHAPE)}"
    )
    for length in arguments.lengths:
        trained = training(machine, length, arguments.rounds) if length <= arguments.train_up_to else None
        decoded, held = decoding(machine, length, arguments.rounds)
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
