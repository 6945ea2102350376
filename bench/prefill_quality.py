"""The parts of `prefill.py` about quality: whole models, needles, phases, and the offline search."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from isophase.needle.prompts import NeedleTask
from isophase.needle.settings import NeedleSettings
from isophase.prefill import (
    AShape,
    BlockSparse,
    Dense,
    Geometry,
    Pattern,
    PrefillRun,
    Sampling,
    Settings,
    Table,
    VerticalSlash,
    look,
    make_plan,
    parse_pattern,
    sample_head,
    search,
    sparse_prefill,
)
from isophase.prefill.choose.offline import CANDIDATES
from isophase.probes.lexicon import PROSE
from isophase.statistics.intervals import wilson
from isophase.targets.huggingface import HuggingFaceTokenizer
from prefill_inputs import captured, load, recall_of, show, spread, text_ids


def model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole-model prefill: time, and perplexity of the second half of each text (at most 2,048 tokens)."""
    lm, tokenizer = load(options.folder)
    lm(text_ids(tokenizer, 1024), logits_to_keep=1, use_cache=False)  # the first pass of a process is slower
    out = []
    for tokens in options.lengths:
        texts = text_ids(tokenizer, tokens * options.rounds).view(options.rounds, 1, tokens)
        keep = min(tokens // 2, 2048)
        ratios: dict[float, list[float]] = {target: [] for target in options.targets}
        lost: dict[float, list[float]] = {target: [] for target in options.targets}
        runs: dict[float, list[PrefillRun]] = {target: [] for target in options.targets}
        dense_s = []
        for number, ids in enumerate(texts):
            base, took = 0.0, {}
            for target in (None, *options.targets) if number % 2 else (*options.targets, None):
                with ExitStack() as stack:
                    if target is not None:
                        runs[target].append(stack.enter_context(
                            sparse_prefill(lm, target_recall=target, threshold_tokens=options.threshold)
                        ))  # fmt: skip
                    began = time.perf_counter()
                    logits = lm(ids, logits_to_keep=keep, use_cache=False).logits
                    took[target] = time.perf_counter() - began
                loss = float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1 - keep :]))
                if target is None:
                    base = loss
                else:
                    lost[target].append(loss)
            dense_s.append(took[None])
            for target in options.targets:
                ratios[target].append(took[None] / took[target])
                lost[target][-1] -= base
        for target, found in runs.items():
            change = [math.exp(more) for more in lost[target]]
            out.append(show({
                "tokens": tokens, "texts": options.rounds, "target": target, "times_faster": spread(ratios[target]),
                "threshold": found[0].threshold_tokens,
                "density": round(statistics.fmean(run.density() for run in found), 4),
                "recall": round(statistics.fmean(run.recall() for run in found), 4),
                "perplexity_times_dense": round(math.exp(statistics.fmean(lost[target])), 4),
                "by_text": [round(value, 4) for value in change],
                "seconds_by_part": {k: round(v, 2) for k, v in found[0].seconds().items()},
                "dense_s": spread(dense_s),
            }))  # fmt: skip
    return out


def needle(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Greedy answers on the needle grid: as many tokens as the code has, sparse against dense, token by token."""
    lm, tokenizer = load(options.folder)
    task = NeedleTask(
        NeedleSettings(
            target=options.folder, fingerprint="", caches=("full",), lengths=tuple(options.lengths), isophase="",
            depths=options.depths, phases=options.phases, seed=options.seed, haystack="", wording="",
        ), HuggingFaceTokenizer(tokenizer), PROSE,
    )  # fmt: skip
    out = []
    for number, tokens in enumerate(options.lengths):
        size = options.depths * options.phases
        same = dict.fromkeys(options.targets, 0)
        right = {"dense": 0, **{str(t): 0 for t in options.targets}}
        for row in range(number * size, (number + 1) * size):
            prompt = task.prompt(row)
            ids = torch.from_numpy(prompt.ids).long()[None]
            ask = {"max_new_tokens": len(prompt.answer_ids), "do_sample": False, "attention_mask": torch.ones_like(ids)}
            base = lm.generate(ids, **ask)[0, ids.shape[1] :].tolist()
            right["dense"] += tuple(base) == prompt.answer_ids
            for target in options.targets:
                with sparse_prefill(lm, target_recall=target, threshold_tokens=options.threshold):
                    found = lm.generate(ids, **ask)[0, ids.shape[1] :].tolist()
                same[target] += found == base
                right[str(target)] += tuple(found) == prompt.answer_ids
        out.append(show({"tokens": tokens, "prompts": size, "same_as_dense": same, "right": right}))
    return out


def phase(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Whether the newest queries read all eight tokens of a needle, by its phase in 64-token blocks."""
    width, span, grid = 64, 8, 64
    kinds: dict[str, Pattern] = {
        "blocks, fixed grid": BlockSparse(windows=options.windows, overlap=1),
        # As many keys: windows that overlap have keys in common.
        "blocks, half-shifted": BlockSparse(windows=options.windows + options.windows // 4, overlap=2),
        "vertical-slash": VerticalSlash(columns=32 * options.windows, slash_tokens=32 * options.windows),
    }
    geometry, out = Geometry(tokens=options.tokens), []
    covered = {name: torch.zeros(grid, dtype=torch.long) for name in kinds}
    keys_read = dict.fromkeys(kinds, 0.0)
    for item in range(options.items):
        generator = torch.Generator().manual_seed(item)
        direction = torch.nn.functional.normalize(torch.randn(width, generator=generator), dim=0)
        noise_key = torch.randn(options.tokens, width, generator=generator)
        query = options.strength * direction + torch.randn(options.tokens, width, generator=generator)
        block = int(torch.randint(4, options.tokens // grid - 8, (1,), generator=generator))
        for place in range(grid):
            key = noise_key.clone()
            at = block * grid + place
            key[at : at + span] += options.strength * direction
            sample = sample_head(query, key, geometry, Sampling(), scaling=width**-0.5)
            for name, pattern in kinds.items():
                reads = pattern.choose(sample)
                plan = make_plan([reads], geometry)
                covered[name][place] += int(plan.rows(0, torch.tensor([options.tokens - 1]))[0, at : at + span].all())
                keys_read[name] += float(plan.history_HQ()[0, -1]) / (options.items * grid)
    edge = torch.arange(grid) > grid - span
    for name, hits in covered.items():
        inside, cut = int(hits[~edge].sum()), int(hits[edge].sum())
        trials = [options.items * int(x.sum()) for x in (~edge, edge)]
        low, high = wilson([inside, cut], trials)
        out.append(show({
            "selection": name, "keys_read": round(keys_read[name]), "items": options.items,
            "inside": [round(v, 3) for v in (inside / trials[0], low[0], high[0])],
            "cut_by_an_edge": [round(v, 3) for v in (cut / trials[1], low[1], high[1])],
            "by_phase": [round(v, 2) for v in (hits / options.items).tolist()],
            "gap_points": round(100 * float(hits.max() - hits.min()) / options.items, 1),
        }))  # fmt: skip
    return out


def search_bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time of a search, whether it repeats, and its picks against one setting for all heads, on another text."""
    lm, tokenizer = load(options.folder)
    ids = text_ids(tokenizer, 2 * options.tokens)
    began = time.perf_counter()
    first = search(lm, ids[:, : options.tokens], budget=options.budget)
    took = time.perf_counter() - began
    again = search(lm, ids[:, : options.tokens], budget=options.budget)
    out = [show({
        "seconds": round(took, 1), "same_again": first == again, "tokens": options.tokens,
        "recall": round(first.recall(), 4), "density": round(first.density(), 4),
    })]  # fmt: skip
    other = ids[:, options.tokens :]
    layers = list(range(0, lm.config.num_hidden_layers, options.every))
    with captured(lm, layers) as inputs:
        lm(other, logits_to_keep=1, use_cache=False)
    geometry = Geometry(tokens=options.tokens)
    table = Table(layers=[[parse_pattern(h.pattern) for h in heads] for heads in first.layers])
    rivals = {"searched": table} | {
        repr(p): Table(layers=[[p]]) for p in CANDIDATES if not isinstance(p, Dense | AShape)
    }
    for name, policy in rivals.items():
        settings = Settings(policy=policy, sampling=Sampling(), costs=None)
        recalls, densities = [], []
        for layer, (query, key, _) in inputs.items():
            found = recall_of(
                [c.reads for c in look(query, key, settings, geometry, layer=layer)], query, key, geometry, 128
            )
            recalls += found[0]
            densities += found[1]
        out.append(show({
            "policy": name, "recall": round(statistics.fmean(recalls), 4), "worst": round(min(recalls), 4),
            "density": round(statistics.fmean(densities), 4),
        }))  # fmt: skip
    mine = out[1]
    fair = [r for r in out[2:] if r["density"] <= mine["density"] * 1.02]
    out.append(
        show({"best_fixed_at_no_more_keys": max(fair, key=lambda r: r["recall"], default=None), "searched": mine})
    )
    return out
