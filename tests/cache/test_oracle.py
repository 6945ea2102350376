"""Every method against plain loops over lists written from the papers, on the attention that transformers reports.

`attention[h][q][k]` is the attention that query q of head h pays to token k. Nothing of isophase is used in the loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    Method,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    compress,
    hash_rule,
)
from isophase.models.compat import cache_argument

FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt_neox", "granite",
    "olmo2", "cohere", "starcoder2",
]  # fmt: skip
WINDOW, BUDGET, LENGTH = 6, 23, 71

Attention = Sequence[Sequence[Sequence[float]]]


def votes(attention: Attention, head: int, window: int) -> list[float]:
    """What the last `window` queries pay to each token before the window."""
    length = len(attention[head])
    return [sum(attention[head][q][k] for q in range(length - window, length)) for k in range(length - window)]


def group(attention: Attention, kv_head: int, kv_heads: int) -> range:
    size = len(attention) // kv_heads
    return range(kv_head * size, (kv_head + 1) * size)


def best_first(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def snapkv(attention: Attention, kv_head: int, kv_heads: int, budget: int, window: int, kernel: int, pooling: str):
    length = len(attention[0])
    heads = group(attention, kv_head, kv_heads)
    total = [0.0] * (length - window)
    for head in heads:
        vote = votes(attention, head, window)
        for k in range(len(vote)):
            around = [
                vote[i] if 0 <= i < len(vote) else 0.0 for i in range(k - kernel // 2, k + kernel // 2 + 1)
            ]  # fmt: skip
            total[k] += max(around) if pooling == "max" else sum(around) / kernel
    chosen = best_first(total)[: budget - window]
    return sorted(chosen) + list(range(length - window, length))


def by_chunks(vote: Sequence[float], chunks: Sequence[Sequence[int]], budget: int, power: float) -> list[int]:
    """Tokens of the best chunks, in order of rank, until the budget is full."""
    scores = [sum(vote[k] for k in chunk) / len(chunk) ** power for chunk in chunks]
    chosen: list[int] = []
    for rank in best_first(scores):
        for k in chunks[rank]:
            if len(chosen) < budget:
                chosen.append(k)
    return sorted(chosen)


def mean_votes(attention: Attention, heads: Sequence[int], window: int) -> list[float]:
    each = [votes(attention, head, window) for head in heads]
    return [sum(v[k] for v in each) / len(each) for k in range(len(each[0]))]


def grid(length: int, size: int, shift: int = 0) -> list[list[int]]:
    """Chunks of `size` tokens; with a shift the first has `shift` tokens."""
    out: list[list[int]] = []
    for k in range(length):
        if k == 0 or (k - shift) % size == 0:
            out.append([])
        out[-1].append(k)
    return out


def local_maxima(scores: Sequence[int], radius: int, longest: int) -> list[int]:
    """Starts of chunks: strictly above the left half of the neighbourhood, at least the right half, all of it read."""
    starts, last = [], 0
    for t in range(1, len(scores) - radius):
        left = scores[max(0, t - radius) : t]
        right = scores[t + 1 : t + radius + 1]
        if all(scores[t] > s for s in left) and all(scores[t] >= s for s in right):
            starts.append(t)
            last = t
        elif (t - last) % longest == 0:
            starts.append(t)
    return starts


def cut(length: int, starts: Sequence[int]) -> list[list[int]]:
    """Chunks between starts."""
    edges = [0, *[s for s in starts if s < length], length]
    return [list(range(a, b)) for a, b in pairwise(edges)]


def tokens_by_hash(ids: Sequence[int]) -> list[int]:
    """The documented integer finaliser: 16-bit xor-shifts and products, on 32 bits."""
    out = []
    for token in ids:
        x = (token + 1) & 0xFFFFFFFF
        for _ in range(2):
            x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        out.append((x ^ (x >> 16)) >> 1)
    return out


def expected(method: Method, attention: Attention, ids: list[int], kv_head: int, kv_heads: int) -> list[int]:
    """Places that a method keeps in one KV head, by the loops."""
    length = len(attention[0])
    window = list(range(length - WINDOW, length))
    heads = range(len(attention)) if getattr(method, "share_heads", False) else group(attention, kv_head, kv_heads)
    before, room = length - WINDOW, BUDGET - WINDOW
    if isinstance(method, StreamingLLM):
        return list(range(4)) + list(range(length - BUDGET + 4, length))
    if isinstance(method, SnapKV):
        return snapkv(attention, kv_head, kv_heads, BUDGET, WINDOW, method.kernel_tokens, method.pooling)
    vote = mean_votes(attention, heads, WINDOW)
    if isinstance(method, ChunkKV):
        return by_chunks(vote, grid(before, method.chunk_tokens, method.shift_tokens), room, 0.0) + window
    if isinstance(method, DynamicChunkKV):
        starts = local_maxima(tokens_by_hash(ids), 4, 24)
        power = {"sum": 0.0, "root": 0.5, "mean": 1.0}[method.average]
        return by_chunks(vote, cut(before, starts), room, power) + window
    assert isinstance(method, VotedChunkKV)
    total = [0.0] * before
    for shift in range(method.chunk_tokens):
        for chunk in grid(before, method.chunk_tokens, shift):
            for k in chunk:
                total[k] += sum(vote[i] for i in chunk)
    return sorted(best_first(total)[:room]) + window


METHODS = {
    "streaming": StreamingLLM(budget=BUDGET, window_tokens=WINDOW),
    "snapkv": SnapKV(budget=BUDGET, window_tokens=WINDOW),
    "snapkv-max": SnapKV(budget=BUDGET, window_tokens=WINDOW, kernel_tokens=7, pooling="max"),
    "chunkkv": ChunkKV(budget=BUDGET, window_tokens=WINDOW, chunk_tokens=7),
    "chunkkv-shifted": ChunkKV(budget=BUDGET, window_tokens=WINDOW, chunk_tokens=7, shift_tokens=3),
    "chunkkv-shared": ChunkKV(budget=BUDGET, window_tokens=WINDOW, chunk_tokens=7, share_heads=True),
    "chunkkv-tokens": ChunkKV(budget=BUDGET, window_tokens=WINDOW, chunk_tokens=1),
    "dynamic": DynamicChunkKV(budget=BUDGET, window_tokens=WINDOW),
    "dynamic-sum": DynamicChunkKV(budget=BUDGET, window_tokens=WINDOW, average="sum"),
    "dynamic-mean": DynamicChunkKV(budget=BUDGET, window_tokens=WINDOW, average="mean"),
    "voted": VotedChunkKV(budget=BUDGET, window_tokens=WINDOW, chunk_tokens=5),
}


def attention_of(model: Any, ids: torch.Tensor) -> list[Any]:
    return [layer[0].double().tolist() for layer in model(ids, output_attentions=True).attentions]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keeps_what_the_paper_keeps(name, attention, make_model, random_ids) -> None:
    method, ids = METHODS[name], random_ids(LENGTH)
    true = attention_of(make_model("llama", attention="eager"), ids)
    model = make_model("llama", attention=attention)
    cache = compress(model, method)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    kept = cache.what_was_kept()
    assert [k.layer for k in kept] == [0, 1]
    for layer in kept:
        for head in range(2):
            want = expected(method, true[layer.layer], ids[0].tolist(), head, 2)
            assert layer.positions_BKE[0, head].tolist() == want


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["snapkv", "chunkkv"])
def test_every_family(family, name, make_model, random_ids) -> None:
    method, ids = METHODS[name], random_ids(LENGTH)
    model = make_model(family, attention="eager")
    true = attention_of(model, ids)
    cache = compress(model, method)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    kept = cache.what_was_kept()
    sliding = family in ("gemma2", "gemma3")
    assert [k.layer for k in kept] == ([1] if sliding else [0, 1])
    for layer in kept:
        heads = layer.positions_BKE.shape[1]
        for head in range(heads):
            want = expected(method, true[layer.layer], ids[0].tolist(), head, heads)
            assert layer.positions_BKE[0, head].tolist() == want
    if sliding:
        assert cache.layers[0].keys.shape[2] == 11  # window - 1: transformers' own, as it was


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoding_reads_what_was_kept_and_nothing_else(family, attention, make_model, random_ids) -> None:
    """Against the whole cache under a mask that hides what was dropped: values, order and positions."""
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("transformers computes softcapped attention in eager only")
    if family in ("gemma2", "gemma3"):
        pytest.skip("one mask cannot speak for both kinds of layer")
    method = ChunkKV(budget=BUDGET, window_tokens=WINDOW, chunk_tokens=7, reuse_layers=2)
    ids, new = random_ids(LENGTH), random_ids(3, seed=5)
    model = make_model(family, attention=attention)
    cache, whole = compress(model, method), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
        model(ids, **cache_argument(whole))
        places = cache.what_was_kept()[0].positions_BKE[0]
        for step in range(3):
            got = model(new[:, step : step + 1], **cache_argument(cache)).logits
            seen = torch.zeros(1, len(places), 1, LENGTH + step + 1, dtype=torch.bool)
            seen[..., LENGTH:] = True
            for head, kept in enumerate(places):
                seen[0, head, 0, kept] = True
            seen = seen.repeat_interleave(4 // len(places), dim=1)
            mask = seen if attention == "sdpa" else torch.zeros(seen.shape).masked_fill(~seen, -1e30)
            want = model(
                new[:, step : step + 1],
                attention_mask=mask,
                position_ids=torch.tensor([[LENGTH + step]]),
                **cache_argument(whole),
            ).logits
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_part_of_several_tokens_reads_the_same_as_one_by_one(attention, make_model, random_ids) -> None:
    """The mask over kept entries in a step of several queries."""
    method = SnapKV(budget=BUDGET, window_tokens=WINDOW)
    ids, new = random_ids(LENGTH), random_ids(4, seed=5)
    model = make_model("llama", attention=attention)
    first, second = compress(model, method), compress(model, method)
    with torch.no_grad():
        model(ids, **cache_argument(first))
        model(ids, **cache_argument(second))
        single = [model(new[:, n : n + 1], **cache_argument(first)).logits for n in range(4)]
        together = model(new, **cache_argument(second)).logits
    torch.testing.assert_close(torch.cat(single, dim=1), together, atol=2e-5, rtol=1e-4)
    assert hash_rule().max_tokens == 24
