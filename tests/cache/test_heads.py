"""Budgets by KV head: exact to the entry and the byte, and each head as under a budget of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GptOssConfig, GptOssForCausalLM

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    MergedChunks,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    compress,
    draw_kept,
)
from isophase.models.compat import cache_argument

WINDOW = 4
METHODS = {
    "streaming": StreamingLLM(budget=99, window_tokens=WINDOW),
    "snapkv": SnapKV(budget=99, window_tokens=WINDOW),
    "chunkkv": ChunkKV(budget=99, window_tokens=WINDOW, chunk_tokens=7),
    "dynamic": DynamicChunkKV(budget=99, window_tokens=WINDOW),
    "voted": VotedChunkKV(budget=99, window_tokens=WINDOW, chunk_tokens=5),
    "merged": MergedChunks(budget=99, window_tokens=WINDOW, chunk_tokens=5),
}
ENTRY_BYTES = 2 * 8 * 4  # one KV head of one layer: key and value of width 8, float32


def kept(model, method, ids):
    with compress(model, method) as cache, torch.no_grad():
        model(ids, **cache_argument(cache))
        return cache, cache.what_was_kept()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(METHODS)), length=st.integers(2, 130),
    budgets=st.lists(st.tuples(st.integers(8, 60), st.integers(8, 60)), min_size=2, max_size=2),
    once=st.booleans(),
)  # fmt: skip
def test_entries_and_bytes_are_exact(name, length, budgets, once, make_model, random_ids) -> None:
    model = make_model("llama")
    given_budgets = (budgets[0],) if once else tuple(budgets)
    cache, layers = kept(model, replace(METHODS[name], budget=given_budgets), random_ids(length, seed=length))
    total = 0
    for n, layer in enumerate(layers):
        for head, budget in enumerate(given_budgets[0 if once else n]):
            assert int((layer.positions_BKE[0, head] >= 0).sum()) == min(budget, length)
            assert layer.positions_BKE[0, head].max() == length - 1
            total += min(budget, length)
    assert cache.stored_bytes() == total * ENTRY_BYTES


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_each_head_keeps_what_it_would_keep_alone(name, padded, make_model, random_ids) -> None:
    model, ids = make_model("llama"), random_ids(70, rows=2)
    mask = torch.ones_like(ids)
    mask[1, : 30 * padded] = 0
    both = ((31, 12), (9, 31))

    def places(budget):
        cache = compress(model, replace(METHODS[name], budget=budget))
        with torch.no_grad():
            model(ids, attention_mask=mask, **cache_argument(cache))
        return [
            [[row[row >= 0].tolist() for row in layer.positions_BKE[:, head]] for head in range(2)]
            for layer in cache.what_was_kept()
        ]

    got, alone = places(both), {budget: places(budget) for budget in (9, 12, 31)}
    for n, heads in enumerate(both):
        for head, budget in enumerate(heads):
            assert got[n][head] == alone[budget][n][head]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt_neox"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoding_reads_what_each_head_kept(family, attention, make_model, random_ids) -> None:
    """Against the whole cache under a mask that hides what was dropped."""
    model, ids, new = make_model(family, attention=attention), random_ids(60), random_ids(3, seed=5)
    heads = {"gpt_neox": 4}.get(family, 2)
    budgets = tuple(12 + 7 * (head % 3) for head in range(heads))
    cache = compress(model, ChunkKV(budget=(budgets,), window_tokens=WINDOW, chunk_tokens=7, reuse_layers=2))
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
        model(ids, **cache_argument(whole))
        places = cache.what_was_kept()[0].positions_BKE[0]
        for step in range(3):
            got = model(new[:, step : step + 1], **cache_argument(cache)).logits
            seen = torch.zeros(1, heads, 1, 60 + step + 1, dtype=torch.bool)
            seen[..., 60:] = True
            for head, row in enumerate(places):
                seen[0, head, 0, row[row >= 0]] = True
            seen = seen.repeat_interleave(4 // heads, dim=1)
            mask = seen if attention == "sdpa" else torch.zeros(seen.shape).masked_fill(~seen, -1e30)
            place = torch.tensor([[60 + step]])
            want = model(
                new[:, step : step + 1], attention_mask=mask, position_ids=place, **cache_argument(whole)
            ).logits
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_equal_budgets_are_one_budget(make_model, random_ids) -> None:
    model, ids, new = make_model("llama"), random_ids(60), random_ids(1, seed=5)
    one, two = (compress(model, replace(METHODS["chunkkv"], budget=budget)) for budget in (20, ((20, 20),)))
    with torch.no_grad():
        for cache in (one, two):
            model(ids, **cache_argument(cache))
        logits = [model(new, **cache_argument(cache)).logits for cache in (one, two)]
    assert torch.equal(*logits)
    assert one.stored_bytes() == two.stored_bytes()


def test_sliding_layers_stay_as_they_are(make_model, random_ids) -> None:
    cache, layers = kept(make_model("gemma3"), SnapKV(budget=((20, 9),), window_tokens=WINDOW), random_ids(60))
    assert cache.layers[0].keys.shape[2] == 11  # window - 1
    assert [(layer.layer, layer.positions_BKE.shape) for layer in layers] == [(1, (1, 2, 20))]


def test_sinks_are_of_all_heads_together() -> None:
    config = GptOssConfig(
        vocab_size=89, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=12,
        attn_implementation="eager",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"attention sinks.*give one budget for all heads"):
        compress(GptOssForCausalLM(config), SnapKV(budget=((20, 9),), window_tokens=WINDOW))


def test_the_picture_shows_each_head(make_model, random_ids) -> None:
    cache, layers = kept(make_model("llama"), StreamingLLM(budget=((10, 16),)), random_ids(60))
    assert draw_kept(layers, cache.get_seq_length()).count("fill-opacity") == 2 * (10 + 16)
