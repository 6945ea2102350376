"""Which wording of needle and question the model itself answers, with its full cache: no compressed cache is asked.

    python bench/real_models.py smollm2 FOLDER
    python bench/needle_wording.py FOLDER --lengths 1000 4000 --places 10

Random codes at random places of the licence text; each text is read once and asked every question. Right means all
five digits. Mean log-probability of the code beside it. The seed is not that of `isophase needle`.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from isophase.models.compat import cache_argument
from isophase.probes.vocabulary import piece_ids
from isophase.targets.huggingface import HuggingFaceTarget

NEEDLES = (
    " The secret code is", " The secret password is", " The special magic number is", " The secret number of London is",
)  # fmt: skip
QUESTIONS = ("\nQuestion: What is the {thing}?\nAnswer: The {thing} is", "\n\nThe {thing} is")
LICENSE = Path(__file__).parent.parent / "LICENSE"
LONGEST_QUESTION = 40


def ask(target: HuggingFaceTarget, ids: list[int], questions: list[list[int]], answer: list[int]) -> list[float | None]:
    """Log-probability of the answer after each question; None where it is not the most likely continuation."""
    cache, out = DynamicCache(config=target.config), []
    want = torch.tensor(answer)
    with torch.inference_mode():
        target.model(torch.tensor([ids]), logits_to_keep=1, use_cache=True, **cache_argument(cache))
        for question in questions:
            tail = torch.tensor([question + answer[:-1]])
            logits = target.model(tail, use_cache=True, **cache_argument(copy.deepcopy(cache))).logits[0]
            log_p = torch.log_softmax(logits[-len(answer) :].float(), -1)
            chosen = float(log_p.gather(1, want[:, None]).sum())
            out.append(chosen if bool((log_p.argmax(-1) == want).all()) else None)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--places", type=int, default=10)
    parser.add_argument("--seed", type=int, default=99)
    options = parser.parse_args()
    target = HuggingFaceTarget(options.folder)
    text = " " + " ".join(LICENSE.read_text(encoding="utf-8").split())
    filler = np.array(piece_ids(target.tokenizer, text), dtype=np.int64)
    for length in options.lengths:
        rng = np.random.default_rng([options.seed, length])
        right: dict[tuple[str, str], list[float | None]] = {}
        for _ in range(options.places):
            code = list(piece_ids(target.tokenizer, f" {rng.integers(10_000, 100_000)}"))
            start, depth = int(rng.integers(len(filler))), float(rng.uniform())
            for needle in NEEDLES:
                span = [*piece_ids(target.tokenizer, needle), *code, *piece_ids(target.tokenizer, ".")]
                room = length - len(span) - LONGEST_QUESTION
                around = np.take(filler, start + np.arange(room), mode="wrap").tolist()
                at = int(depth * room)
                thing = needle.removeprefix(" The ").removesuffix(" is")
                questions = [list(piece_ids(target.tokenizer, q.format(thing=thing))) for q in QUESTIONS]
                ids = [*target.tokenizer.prefix_ids, *around[:at], *span, *around[at:]]
                for question, found in zip(QUESTIONS, ask(target, ids, questions, code), strict=True):
                    right.setdefault((needle, question), []).append(found)
        for (needle, question), found in right.items():
            known = [f for f in found if f is not None]
            line = {"length": length, "needle": needle, "question": question, "right": len(known), "of": len(found)}
            line["log_probability_where_right"] = round(float(np.mean(known)), 3) if known else None
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
