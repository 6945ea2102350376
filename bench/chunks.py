"""What chunks by content cost beside a forward pass, how full their buffers are, and how alike layers would cut.

    python bench/chunks.py
    python bench/chunks.py --model FOLDER        boundaries by layer of a real model, such as SmolLM2

1. Time of boundaries, layouts and masks as a share of a forward pass of a model 256 wide with four layers.
2. Rows of packed buffers that hold a token, by multiple, on prose and code cut by delimiters and by hash.
3. Boundaries found separately in every layer, from the cosine of neighbouring states, against those of the first
   layer: the share of starts that are the same, and the same within one token. Boundaries are computed once per
   forward and read by all layers; this is what is given up, or spared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from isophase.cache.methods.dynamic import delimiter_rule, hash_rule
from isophase.chunking.layout import ChunkLayout
from isophase.chunking.packing import pack
from isophase.chunking.rules import ChunkRule, LocalMaximum, NeighbourCosine
from isophase.models.config import CompressedQwen3Config
from isophase.models.masks import dense_mask
from isophase.models.qwen3 import CompressedQwen3ForCausalLM
from memory import MEMORIES, SHAPE

TIMED = ("fixed W8/S8", "hash", "hash, overlap 2")


def share_of_a_forward(lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Seconds of finding chunks, and of a whole forward pass, in turns."""
    rows = []
    for length in lengths:
        for memory in TIMED:
            torch.manual_seed(0)
            settings = {**SHAPE, **MEMORIES[memory], "max_position_embeddings": length}
            model = CompressedQwen3ForCausalLM(CompressedQwen3Config(**settings)).eval()
            ids = torch.randint(0, SHAPE["vocab_size"], (max(1, 4096 // length), length))
            finding, masking, whole = [], [], []
            with torch.inference_mode():
                position = torch.arange(length)
                for number in range(rounds + 1):
                    hidden = model.model.embed_tokens(ids)
                    embedded = time.perf_counter()
                    chunks, _ = model.model._chunk_reader.read(ids, hidden, None)
                    found = time.perf_counter()
                    dense_mask(model.config, chunks[0], 0, position, hidden.dtype)
                    masked = time.perf_counter()
                    model(ids, use_cache=False, logits_to_keep=1)
                    ended = time.perf_counter()
                    if number:
                        finding.append((found - embedded) / (ended - masked))
                        masking.append((masked - found) / (ended - masked))
                        whole.append(ended - masked)
            row = {
                "memory": memory,
                "tokens": length,
                "boundaries_share": spread(finding),
                "mask_share": spread(masking),
                "forward_seconds": statistics.median(whole),
            }
            rows.append(row)
            print(
                f"{memory:16} {length:6,} tokens: boundaries and layout {percent(finding)} of a forward, its mask "
                f"{percent(masking)}; forward {row['forward_seconds'] * 1000:.0f} ms"
            )
    return rows


def spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def percent(values: list[float]) -> str:
    middle, low, high = spread(values)
    return f"{100 * middle:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def starts_of(rule: ChunkRule, ids: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Positions of all starts in one row, the first token included."""
    flags, _ = rule.starts(ids, hidden)
    found = flags[0].nonzero()[:, 0] - rule.lookahead_tokens
    return torch.cat([torch.zeros(1, dtype=torch.long), found])


def fill_of_buffers(texts: dict[str, torch.Tensor], rules: dict[str, ChunkRule]) -> list[dict[str, Any]]:
    """Rows in use, by text, rule and multiple."""
    rows = []
    for text, ids in texts.items():
        for name, rule in rules.items():
            flags, _ = rule.starts(ids)
            layout, _ = ChunkLayout.from_flags(flags, rule.lookahead_tokens, 0, torch.zeros(1, dtype=torch.long))
            longest = int(layout.length_BE.max())
            used = {m: pack(layout, 1, ids.shape[1], longest, multiple_of=m).utilisation for m in (8, 16, 32)}
            mean = float(layout.length_BE[0][layout.filled_BE[0]].float().mean())
            rows.append({"text": text, "rule": name, "mean_tokens": mean, "used": used})
            shown = ", ".join(f"{100 * share:.1f} % at {m}" for m, share in used.items())
            print(f"{text:6} {ids.shape[1]:,} tokens by {name:10}: chunks of {mean:.1f} tokens, rows used {shown}")
    return rows


def layers_alike(model: Any, ids: torch.Tensor, radius: int) -> list[dict[str, Any]]:
    """Starts of every layer against those of the first."""
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    rule = LocalMaximum(score=NeighbourCosine(), radius_tokens=radius, max_tokens=4 * radius)
    rows, first, before = [], None, None
    for number, hidden in enumerate(states[:-1]):
        starts = starts_of(rule, ids, hidden.float())
        first = starts if first is None else first
        before = starts if before is None else before
        row = {"layer": number, "starts": len(starts)}
        for name, other in (("first", first), ("before", before)):
            apart = (starts[:, None] - other[None]).abs().min(dim=1).values
            row[f"same_as_{name}"] = float((apart == 0).float().mean())
            row[f"near_{name}"] = float((apart <= 1).float().mean())
        rows.append(row)
        before = starts
    for row in rows[:: max(1, len(rows) // 10)]:
        print(
            f"layer {row['layer']:2}: {row['starts']} starts; {row['same_as_first']:.2f} as in the first layer "
            f"({row['near_first']:.2f} within a token), {row['same_as_before']:.2f} as in the layer before"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a transformers model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1024, help="of the text that layers are compared on")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    result: dict[str, Any] = {"forward": share_of_a_forward(chosen.lengths, chosen.rounds)}
    if chosen.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(chosen.model)
        stdlib = Path(sysconfig.get_path("stdlib"))
        texts = {
            "prose": tokenizer((stdlib / "LICENSE.txt").read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
            if (stdlib / "LICENSE.txt").exists()
            else tokenizer((stdlib / "pydoc_data/topics.py").read_text(), return_tensors="pt")["input_ids"][:, :16_384],
            "code": tokenizer((stdlib / "argparse.py").read_text(encoding="utf-8"), return_tensors="pt")["input_ids"],
        }
        rules = {
            "delimiters": delimiter_rule(tokenizer.decode, len(tokenizer), max_tokens=24),
            "hash": hash_rule(max_tokens=14),
        }
        result["buffers"] = fill_of_buffers(texts, rules)
        model = AutoModelForCausalLM.from_pretrained(chosen.model).eval()
        result["layers"] = {}
        for name, ids in texts.items():
            print(f"{name}, {chosen.tokens:,} tokens:")
            result["layers"][name] = layers_alike(model, ids[:, : chosen.tokens], radius=4)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads"
    )
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
