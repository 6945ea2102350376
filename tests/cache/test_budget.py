"""The realised budget is the requested one: for every length, chunk, phase, ratio, row and head."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    Entries,
    MergedChunks,
    Method,
    Scene,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    compress,
)
from isophase.models.compat import cache_argument

METHODS = {
    "streaming": StreamingLLM,
    "snapkv": SnapKV,
    "chunkkv": ChunkKV,
    "dynamic": DynamicChunkKV,
    "voted": VotedChunkKV,
    "merged": MergedChunks,
}


def scene(method: Method, lengths: list[int], *, heads: int = 2, seed: int = 0, flat: bool = False) -> Scene:
    """Random keys for rows of some lengths; `flat`: all alike, so that every score is a tie."""
    rng = torch.Generator().manual_seed(seed)
    rows, most, width = len(lengths), max(lengths), 4
    keys = torch.randn(rows, heads, most, width, generator=rng)
    queries = torch.randn(rows, 2 * heads, method.window_tokens, width, generator=rng) * 2
    if flat:
        keys, queries = torch.ones_like(keys), torch.ones_like(queries)
    place = torch.arange(most).expand(rows, heads, most)
    first = torch.tensor([most - n for n in lengths])[:, None, None]
    positions = torch.where(place >= first, place, -1)
    budgets = [method.entries(n, 0, 64) for n in lengths]
    at = torch.arange(most)
    query_positions = torch.arange(most - method.window_tokens, most).expand(rows, -1)
    return Scene(
        entries=Entries(keys_BKED=keys, values_BKED=keys * 2, positions_BKE=positions),
        queries_BHWD=queries,
        query_positions_BW=torch.where(query_positions >= first[:, :, 0], query_positions, -1),
        scaling=0.5,
        softcap=None,
        sinks_H=None,
        budget_B=torch.tensor(budgets),
        window_B=torch.tensor([method.window(n) for n in budgets]),
        index_BL=(at - first[:, 0]).clamp(min=0),
        chunk_BL=(at - first[:, 0]).clamp(min=0) // 5,
        rotate=lambda keys, by: keys,
    )


def kept_of(method: Method, stage: Scene) -> list[list[set[int]]]:
    entries, _ = method.compress(stage)
    assert (entries.positions_BKE.diff(dim=-1) >= 0).all()
    real = entries.positions_BKE
    return [[set(head[head >= 0].tolist()) for head in row] for row in real]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(METHODS)),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    budget=st.integers(12, 120),
    chunk=st.integers(1, 24),
    flat=st.booleans(),
    seed=st.integers(0, 50),
)
def test_entries_are_exact(name, lengths, budget, chunk, flat, seed) -> None:
    extra = {"chunk_tokens": chunk} if name in ("chunkkv", "voted", "merged") else {}
    method = METHODS[name](budget=budget, window_tokens=8, **extra)
    stage = scene(method, lengths, seed=seed, flat=flat)
    for row, length in enumerate(lengths):
        window = set(range(max(lengths) - min(8, length), max(lengths)))
        for head in kept_of(method, stage)[row]:
            assert len(head) == min(budget, length)
            assert window <= head  # also where every score is a tie


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(METHODS)),
    length=st.integers(1, 400),
    percent=st.integers(1, 100),
    seed=st.integers(0, 9),
)
def test_ratios_are_exact(name, length, percent, seed) -> None:
    ratio = percent / 100
    method = METHODS[name](ratio=ratio, window_tokens=8)
    want = max(1, int(Fraction(percent, 100) * length))
    (heads,) = kept_of(method, scene(method, [length], seed=seed))
    assert [len(h) for h in heads] == [want, want]
    if want > 1:
        assert all(max(h) == length - 1 for h in heads)


@pytest.mark.parametrize("length", range(1, 401, 3))
def test_the_length_does_not_matter(length) -> None:
    """kvpress keeps 40, 21, 40 and 30 at 1000, 1001, 1005 and 1010 tokens where 50 are wanted."""
    method = ChunkKV(budget=50, window_tokens=8, chunk_tokens=20)
    (heads,) = kept_of(method, scene(method, [length]))
    assert [len(h) for h in heads] == [min(50, length)] * 2


def test_a_ratio_counts_in_decimals() -> None:
    assert ChunkKV(ratio=0.1).entries(50, 0, 1) == 5  # int(50 * (1 - .9)) is 4
    assert ChunkKV(ratio=0.29).entries(100, 0, 1) == 29  # int(100 * .29) is 28


def test_most_of_a_small_ratio_is_not_the_window() -> None:
    method = SnapKV(ratio=0.05, window_tokens=64)
    assert method.window(method.entries(1400, 0, 1)) == 35


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(40, 300), chunk=st.integers(2, 12), share=st.sampled_from([0.0, 0.25, 0.7, 1.0]),
    seed=st.integers(0, 20),
)  # fmt: skip
def test_merged_entries_hold_each_token_once(length, chunk, share, seed) -> None:
    method = MergedChunks(budget=30, window_tokens=8, chunk_tokens=chunk, merged_share=share)
    stage = scene(method, [length], seed=seed)
    entries, _ = method.compress(stage)
    assert entries.counts_BKE is not None
    assert entries.positions_BKE.shape[2] == 30
    assert (entries.counts_BKE >= 1).all()
    assert (entries.counts_BKE <= chunk).all()
    assert (entries.counts_BKE.sum(-1) <= length).all()
    assert (entries.counts_BKE[..., -8:] == 1).all()
    melted = (entries.counts_BKE > 1).sum(-1)
    # One more than the share: what is left of the chunk that the budget cuts is melted too.
    assert (melted <= int(share * 22) + 1).all()
    if share == 0:
        exact, _ = ChunkKV(budget=30, window_tokens=8, chunk_tokens=chunk).compress(stage)
        assert torch.equal(entries.positions_BKE, exact.positions_BKE)
        assert torch.equal(entries.keys_BKED, exact.keys_BKED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_was_promised(dtype, make_model, random_ids) -> None:
    model = make_model("llama", dtype=dtype)
    entry = 2 * 2 * 8 * 2 * dtype.itemsize  # two layers, two KV heads, keys and values of width 8
    for promised in (40 * entry, 40 * entry + entry - 1):
        cache = compress(model, ChunkKV(budget_bytes=promised, window_tokens=4))
        with torch.no_grad():
            model(random_ids(130), **cache_argument(cache))
        assert cache.stored_bytes() == 40 * entry
        assert [k.positions_BKE.shape for k in cache.what_was_kept()] == [(1, 2, 40)] * 2


def test_budgets_by_layer(make_model, random_ids) -> None:
    model = make_model("llama", layers=4)
    cache = compress(model, SnapKV(budget=(40, 30, 20, 12), window_tokens=8))
    with torch.no_grad():
        model(random_ids(90), **cache_argument(cache))
        model(random_ids(1), **cache_argument(cache))
    assert [k.positions_BKE.shape[2] for k in cache.what_was_kept()] == [41, 31, 21, 13]
