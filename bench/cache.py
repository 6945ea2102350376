"""Compressed caches against the full one: prefill, decoding, bytes, and perplexity of what follows.

    python bench/real_models.py smollm2 FOLDER
    python bench/cache.py FOLDER                              2,048 and 8,000 tokens, 5 rounds
    python bench/cache.py FOLDER --lengths 1024 --rounds 3 --texts 4

All sides run in turns within one process, on the same loaded model and the same text; ratios are taken per round, and
their median and range are printed. The full cache is transformers' own. Perplexity: a text is read, compressed at its
end, and the tokens that follow are read from what was kept, in one step. Retrieval is measured by `isophase needle`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, DynamicCache

from isophase.cache import Record, compress, compressed
from isophase.cache.spec import parse_method
from isophase.models.compat import cache_argument
from isophase.targets.huggingface import HuggingFaceTarget

SPEED = (
    "full", "streaming(budget=128)", "snapkv(budget=128)", "chunkkv(budget=128)", "chunkkv(budget=128, reuse_layers=2)",
    "voted(budget=128)", "dynamic(budget=128)", "merged(budget=128)", "chunkkv(budget=512)",
)  # fmt: skip
QUALITY = ("streaming", "snapkv", "chunkkv", "voted", "dynamic", "merged")
RATIOS = (0.5, 0.25, 0.1)
ROOT = Path(__file__).parent.parent


def text_ids(folder: str, tokens: int) -> torch.Tensor:
    """The licence and the documentation of this repository, [1, tokens]; repeated where they end."""
    pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    words = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = AutoTokenizer.from_pretrained(folder)(words, return_tensors="pt")["input_ids"]
    return ids.repeat(1, math.ceil(tokens / ids.shape[1]))[:, :tokens]


def once(model: Any, ids: torch.Tensor, cache: Any, decoded: int) -> tuple[float, float]:
    """Seconds to read the prompt, and seconds per decoded token."""
    began = time.perf_counter()
    model(ids, logits_to_keep=1, use_cache=True, **cache_argument(cache))
    read = time.perf_counter()
    for n in range(decoded):
        model(ids[:, n : n + 1], use_cache=True, **cache_argument(cache))
    return read - began, (time.perf_counter() - read) / decoded


def speed(target: HuggingFaceTarget, lengths: list[int], rounds: int, decoded: int) -> list[dict[str, Any]]:
    """Every method in turns, against transformers' cache in the same round."""
    config = target.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * target.model.dtype.itemsize
    entry *= getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    methods = [parse_method(spec, target.tokenizer.decode, config.vocab_size) for spec in SPEED]
    out = []
    for length in lengths:
        ids = text_ids(target.path, length)
        once(target.model, ids[:, :256], DynamicCache(config=config), 1)  # warm-up
        prefill: dict[str, list[float]] = {spec: [] for spec in SPEED}
        decode: dict[str, list[float]] = {spec: [] for spec in SPEED}
        stored = {}
        for _ in range(rounds):
            base = once(target.model, ids, DynamicCache(config=config), decoded)
            for spec, method in zip(SPEED, methods, strict=True):
                with compress(target.model, method) as cache:
                    took = once(target.model, ids, cache, decoded)
                    stored[spec] = cache.stored_bytes()
                prefill[spec].append(took[0] / base[0])
                decode[spec].append(base[1] / took[1])
        for spec, method in zip(SPEED, methods, strict=True):
            kept = min(length, method.entries(length, 0, entry))
            out.append(
                {
                    "length": length, "cache": spec, "prefill_ratio": spread(prefill[spec]),
                    "decode_speedup": spread(decode[spec]), "bytes": stored[spec],
                    "bytes_as_promised": stored[spec] == (kept + decoded) * entry,
                    "share_of_full_bytes": round(stored[spec] / ((length + decoded) * entry), 4),
                }
            )  # fmt: skip
            print(json.dumps(out[-1]), flush=True)
    return out


def perplexity(target: HuggingFaceTarget, length: int, follow: int, texts: int) -> list[dict[str, Any]]:
    """Mean loss of `follow` tokens after `length` tokens, by method and ratio, on the same texts."""
    specs = ["full", *(f"{name}(ratio={ratio})" for name in QUALITY for ratio in RATIOS)]
    methods = [parse_method(spec, target.tokenizer.decode, target.config.vocab_size) for spec in specs]
    ids = text_ids(target.path, texts * (length + follow))
    losses: dict[str, list[float]] = {spec: [] for spec in specs}
    for n in range(texts):
        part = ids[:, n * (length + follow) : (n + 1) * (length + follow)]
        with compress(target.model, Record()) as read:
            target.model(part[:, :length], logits_to_keep=1, use_cache=True, **cache_argument(read))
            for spec, method in zip(specs, methods, strict=True):
                with compressed(target.model, read, method) as cache:
                    tail = part[:, length:]
                    logits = target.model(tail[:, :-1], use_cache=True, **cache_argument(cache)).logits[0].float()
                losses[spec].append(float(torch.nn.functional.cross_entropy(logits, tail[0, 1:])))
    out = []
    for spec in specs:
        more = [a - b for a, b in zip(losses[spec], losses["full"], strict=True)]
        out.append(
            {
                "cache": spec, "perplexity": round(math.exp(statistics.fmean(losses[spec])), 3),
                "times_full": round(math.exp(statistics.fmean(more)), 4),
                "times_full_range": [round(math.exp(min(more)), 4), round(math.exp(max(more)), 4)],
            }
        )  # fmt: skip
        print(json.dumps(out[-1]), flush=True)
    return out


def spread(values: list[float]) -> list[float]:
    """Median, least and largest."""
    return [round(v, 3) for v in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--only", choices=("speed", "perplexity"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decoded", type=int, default=32)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--follow", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = HuggingFaceTarget(options.folder)
    facts = {
        "torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine(),
        "threads": torch.get_num_threads(), "dtype": str(target.dtype), **vars(options), "json": None,
    }  # fmt: skip
    print(json.dumps(facts), flush=True)
    found: dict[str, Any] = {"facts": facts}
    with torch.inference_mode():
        if options.only != "perplexity":
            found["speed"] = speed(target, options.lengths, options.rounds, options.decoded)
        if options.only != "speed":
            found["perplexity"] = perplexity(target, options.context, options.follow, options.texts)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
