"""Compressed caches against the full one: prefill, decoding, bytes, and perplexity of what follows.

    python bench/real_models.py smollm2 FOLDER
    make kvpress                                              its own environment, with transformers 5.2
    python bench/cache.py FOLDER --kvpress                    2,048 and 8,000 tokens, 5 rounds
    python bench/cache.py FOLDER --lengths 1024 --rounds 3 --texts 4

All sides run in turns, on the same weights, text and number of threads, kvpress in a process of its own that waits
while it is not asked; ratios are taken per round, and their median and range are printed. The full cache is
transformers' own, `kvpress none` that of transformers 5.2 in kvpress's environment. Perplexity: a text is read,
compressed at its end, and the tokens that follow are read from what was kept, in one step. Retrieval is measured by
`isophase needle`. On a machine that does other work, `--clock cpu` with OMP_NUM_THREADS=1 counts the processor time of
each process instead of the time on the wall.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, DynamicCache

from isophase.cache import Method, Record, compress, compressed
from isophase.cache.spec import parse_method
from isophase.models.compat import cache_argument
from isophase.targets.huggingface import HuggingFaceTarget
from kvpress_peer import KvpressPeer

SPEED = (
    "snapkv(budget=128, window_tokens=16)", "chunkkv(budget=128, chunk_tokens=16)",
    "chunkkv(budget=128, chunk_tokens=16, reuse_layers=2)", "voted(budget=128)", "dynamic(budget=128)",
    "merged(budget=128)", "snapkv(budget=512, window_tokens=16)", "chunkkv(budget=512, chunk_tokens=16)",
    "chunkkv(budget=1024, chunk_tokens=16)",
)  # fmt: skip
# kvpress keeps whole chunks of 16 tokens, window included, so budgets here are multiples of 16.
PRESSES: dict[str, dict[str, int]] = {
    f"chunkkv(budget={n}, chunk_tokens=16)": {"budget": n, "chunk_tokens": 16, "window_tokens": 16, "kernel_tokens": 5}
    for n in (128, 512, 1024)
}
PRESSES |= {
    f"snapkv(budget={n}, window_tokens=16)": {"budget": n, "window_tokens": 16, "kernel_tokens": 5} for n in (128, 512)
}
QUALITY = ("streaming", "snapkv", "chunkkv", "voted", "dynamic", "merged")
RATIOS = (0.5, 0.25, 0.1)
ROOT = Path(__file__).parent.parent
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def text_ids(folder: str, tokens: int) -> torch.Tensor:
    """The licence and the documentation of this repository, [1, tokens]; repeated where they end."""
    pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    words = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = AutoTokenizer.from_pretrained(folder)(words, return_tensors="pt")["input_ids"]
    return ids.repeat(1, math.ceil(tokens / ids.shape[1]))[:, :tokens]


def once(model: Any, ids: torch.Tensor, cache: Any, decoded: int, now: Clock) -> tuple[float, float]:
    """Seconds to read the prompt, and seconds per decoded token."""
    began = now()
    model(ids, logits_to_keep=1, use_cache=True, **cache_argument(cache))
    read = now()
    for n in range(decoded):
        model(ids[:, n : n + 1], use_cache=True, **cache_argument(cache))
    return read - began, (now() - read) / decoded


Round = dict[str, tuple[float, float, int]]
"""Of every side: seconds to read, seconds per decoded token, bytes of keys and values."""


def one_round(
    target: HuggingFaceTarget,
    methods: dict[str, Method],
    peer: KvpressPeer | None,
    ids: torch.Tensor,
    decoded: int,
    now: Clock,
) -> Round:
    """Every side once; kvpress right after the method that it is compared with.

    What comes right after the full cache pays for the memory that it leaves, so a short reading stands between them.
    """
    own = DynamicCache(config=target.config)
    took = once(target.model, ids, own, decoded, now)
    found: Round = {"full": (*took, sum(t.nbytes for layer in own.layers for t in (layer.keys, layer.values)))}
    del own
    once(target.model, ids[:, :256], DynamicCache(config=target.config), 8, now)
    asked: list[tuple[str, dict[str, int] | None]] = []
    for spec, method in methods.items():
        with compress(target.model, method) as cache:
            took = once(target.model, ids, cache, decoded, now)
            found[spec] = (*took, cache.stored_bytes())
        asked = [(f"kvpress {spec}", PRESSES[spec])] if spec in PRESSES else []
        if spec == list(methods)[-1]:
            asked.append(("kvpress none", None))
        for side, press in asked if peer is not None else ():
            assert peer is not None
            theirs = peer.time(ids[0].tolist(), press, decoded)
            found[side] = (theirs["prefill_s"], theirs["decode_s"], theirs["bytes"])
    return found


def speed(
    target: HuggingFaceTarget,
    specs: list[str],
    peer: KvpressPeer | None,
    lengths: list[int],
    rounds: int,
    decoded: int,
    now: Clock,
) -> list[dict[str, Any]]:
    """Every method in turns, and kvpress at the same budgets; ratios within a round."""
    config = target.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * target.model.dtype.itemsize
    entry *= getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    methods = {spec: parse_method(spec, target.tokenizer.decode, config.vocab_size) for spec in specs}
    out = []
    for length in lengths:
        ids = text_ids(target.path, length)
        once(target.model, ids[:, :256], DynamicCache(config=config), 1, now)  # warm-up
        if peer is not None:
            peer.time(ids[0, :256].tolist(), None, 1)
        seen = []
        for _ in range(rounds):
            seen.append(one_round(target, methods, peer, ids, decoded, now))
            first = next(iter(methods))
            methods[first] = methods.pop(first)  # another order in the next round
            print(json.dumps({"round": len(seen), **seen[-1]}), flush=True)
        for side in seen[0]:
            known = methods.get(side.removeprefix("kvpress "))
            kept = length if known is None else min(length, known.entries(length, 0, entry))
            held = seen[-1][side][2]
            line: dict[str, Any] = {
                "length": length, "cache": side, "prefill_s": round(statistics.median(r[side][0] for r in seen), 3),
                "prefill_over_full": spread([r[side][0] / r["full"][0] for r in seen]),
                "decode_tokens_per_s": round(1 / statistics.median(r[side][1] for r in seen), 2),
                "decode_speed_over_full": spread([r["full"][1] / r[side][1] for r in seen]),
                "bytes": held, "bytes_as_promised": held == (kept + decoded) * entry,
                "share_of_full_bytes": round(held / seen[-1]["full"][2], 4),
            }  # fmt: skip
            if (theirs := f"kvpress {side}") in seen[0]:
                line["prefill_over_kvpress"] = spread([r[side][0] / r[theirs][0] for r in seen])
                line["decode_speed_over_kvpress"] = spread([r[theirs][1] / r[side][1] for r in seen])
            if (single := side.replace(", reuse_layers=2", "")) != side and single in seen[0]:
                line["prefill_over_no_reuse"] = spread([r[side][0] / r[single][0] for r in seen])
            out.append(line)
            print(json.dumps(line), flush=True)
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
    parser.add_argument("--methods", nargs="+", default=list(SPEED))
    parser.add_argument("--kvpress", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
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
            dtype = str(target.dtype).removeprefix("torch.")
            with KvpressPeer(target.path, dtype, options.clock) if options.kvpress else nullcontext() as peer:
                facts["kvpress"] = peer and peer.versions
                found["speed"] = speed(
                    target, options.methods, peer, options.lengths, options.rounds, options.decoded,
                    CLOCKS[options.clock],
                )  # fmt: skip
        if options.only != "speed":
            found["perplexity"] = perplexity(target, options.context, options.follow, options.texts)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
