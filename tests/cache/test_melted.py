"""A memory that melts: every token counts once, budgets are exact, and what stays alone is what it was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from isophase.cache import Melted, compress, hash_rule, sharp_tokens
from isophase.cache.runtime.information import logits_of
from isophase.chunking import FixedStride
from isophase.models import cache_argument

WORDS = 100


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


METHODS = [
    Melted(tokens_per_entry=3.0, window_tokens=8),
    Melted(budget=24, window_tokens=8),
    Melted(ratio=0.4, window_tokens=8),
    Melted(budget=24, window_tokens=8, worth="length"),
    Melted(budget=30, window_tokens=6, worth="information", sink_tokens=0),
    Melted(tokens_per_entry=2.5, window_tokens=5, worth="attention", units=hash_rule(radius_tokens=1, max_tokens=4)),
    Melted(units=FixedStride(stride_tokens=4), window_tokens=8),
    Melted(units=FixedStride(stride_tokens=3), window_tokens=1, sink_tokens=2, every_tokens=5),
]


def draw(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: PreTrainedModel, method: Melted, ids: torch.Tensor, parts: list[int], mask: torch.Tensor | None = None):
    """The cache after reading in parts, and the logits of the last part."""
    cache = compress(model, method)
    done = 0
    for length in parts:
        end = done + length
        given_mask = None if mask is None else mask[:, :end]
        out = model(ids[:, done:end], attention_mask=given_mask, use_cache=True, **cache_argument(cache))
        done = end
    assert done == ids.shape[1]
    return cache, out.logits


def check_counts(cache, real_tokens: list[int]) -> None:
    """Every token in one entry, entries in order and without gaps."""
    for kept in cache.what_was_kept():
        positions, counts = kept.positions_BKE, kept.counts_BKE
        counts = torch.ones(positions.shape) if counts is None else counts
        for row, tokens in enumerate(real_tokens):
            for head in range(positions.shape[1]):
                there = positions[row, head] >= 0
                own, number = positions[row, head][there], counts[row, head][there].long()
                assert int(number.sum()) == tokens
                first = int(own[0]) - int(number[0])
                # An entry stands at its last token, so the steps between entries are their lengths.
                assert torch.equal(number.cumsum(0) + first, own)


@given(
    method=st.sampled_from(METHODS),
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    rows=st.integers(1, 2),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_token_counts_once(model, method, parts, rows, seed) -> None:
    cache, _ = read(model, method, draw(rows, sum(parts), seed), parts)
    check_counts(cache, [sum(parts)] * rows)


@given(method=st.sampled_from(METHODS), tokens=st.integers(20, 90), decoded=st.integers(1, 45))
@settings(max_examples=20, deadline=None)
def test_decoding_melts_too(model, method, tokens, decoded) -> None:
    ids = draw(1, tokens + decoded)
    cache, _ = read(model, method, ids, [tokens, *[1] * decoded])
    check_counts(cache, [tokens + decoded])
    if method.budget is not None and tokens >= method.budget:
        held = cache.what_was_kept()[0].positions_BKE.shape[2]
        assert held <= method.budget + method.every_tokens


@pytest.mark.parametrize("tokens", [25, 30, 57, 90])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_budgets_are_exact(model, tokens, parts) -> None:
    split = [tokens // parts] * (parts - 1) + [tokens - tokens // parts * (parts - 1)]
    for method, promised in [
        (Melted(budget=24, window_tokens=8), 24),
        (Melted(budget=24, window_tokens=8, worth="length", units=FixedStride(stride_tokens=2)), 24),
        (Melted(ratio=0.5, window_tokens=4, sink_tokens=1), tokens // 2),
        (Melted(budget_bytes=24 * 2 * 2 * 2 * 8 * 4, window_tokens=8), 24),
    ]:
        cache, _ = read(model, method, draw(2, tokens), split)
        for kept in cache.what_was_kept():
            held = (kept.positions_BKE >= 0).sum(-1)
            if method.units is None:
                assert bool((held == min(promised, tokens)).all()), (method, held)
            else:  # units are never cut, so there may be fewer
                assert bool((held <= promised).all())
        if method.budget_bytes is not None:
            assert cache.stored_bytes() <= 2 * method.budget_bytes


@pytest.mark.parametrize("method", [Melted(budget=500), Melted(tokens_per_entry=4, window_tokens=64)])
def test_with_nothing_to_melt_it_is_the_model(model, method) -> None:
    ids = draw(2, 60)
    with torch.no_grad():
        whole = model(ids[:, :59], use_cache=True)
        expected = model(ids[:, 59:], use_cache=True, **cache_argument(_cache_of(whole))).logits
    _, logits = read(model, method, ids, [59, 1])
    assert torch.equal(logits, expected)


def _cache_of(output):
    return output.cache if "cache" in output else output.past_key_values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_do_not_depend_on_each_other_or_on_padding(model, method, side) -> None:
    long, short = draw(1, 60, 1), draw(1, 41, 2)
    pad = torch.zeros(1, 19, dtype=torch.long)
    padded = torch.cat([pad, short] if side == "left" else [short, pad], dim=1)
    mask = (torch.cat([long, padded]) > 0).long()
    cache, _ = read(model, method, torch.cat([long, padded]), [60], mask)
    for kept, alone in zip(cache.what_was_kept(), _alone(model, method, short), strict=True):
        counts = kept.counts_BKE
        there = kept.positions_BKE[1, 0] >= 0
        own = torch.ones(int(there.sum())) if counts is None else counts[1, 0][there]
        expected = torch.ones(len(own)) if alone.counts_BKE is None else alone.counts_BKE[0, 0]
        assert torch.equal(own, expected)
    layer, other = cache.layers[1], compress(model, method)
    with torch.no_grad():
        model(short, use_cache=True, **cache_argument(other))
    there = layer.positions()[1, 0] >= 0
    # Where nothing melted pads are still held.
    there &= layer.positions()[1, 0] < 41 if side == "right" else layer.positions()[1, 0] >= 19
    # Padding on the left moves rotary positions, so values are compared, which see their differences alone.
    torch.testing.assert_close(layer.values[1, 0][there], other.layers[1].values[0, 0], atol=1e-4, rtol=1e-3)


def _alone(model, method, ids):
    cache, _ = read(model, method, ids, [ids.shape[1]])
    return cache.what_was_kept()


def test_entries_are_the_weighted_means_of_their_tokens_and_count_so_often(model) -> None:
    """One layer, written from the definition: partition given, then means, log n and attention."""
    ids = draw(1, 50)
    method = Melted(budget=22, window_tokens=8, worth="information", sink_tokens=3)
    cache, _ = read(model, method, ids, [50])
    with torch.no_grad():
        full = _cache_of(model(ids, use_cache=True)).layers[0]
        said = -torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    worth = torch.cat([torch.zeros(1), said]) + 0.1
    layer = cache.layers[0]
    for head in range(2):
        first = 0
        for entry, count in enumerate(layer.counts()[0, head].long().tolist()):
            span = slice(first, first + count)
            weight = (worth[span] / worth[span].sum())[:, None]
            if count == 1:
                assert torch.equal(layer.keys[0, head, entry], full.keys[0, head, first])
                assert torch.equal(layer.values[0, head, entry], full.values[0, head, first])
            else:
                mean = (full.keys[0, head, span] * weight).sum(0)
                torch.testing.assert_close(layer.keys[0, head, entry], mean, atol=1e-5, rtol=1e-4)
                mean = (full.values[0, head, span] * weight).sum(0)
                torch.testing.assert_close(layer.values[0, head, entry], mean, atol=1e-5, rtol=1e-4)
            first += count
    # A new query: softmax over [entries | itself] with log-counts.
    query = torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(3))
    added = layer.mask(query, None, "sdpa")
    counts = layer.counts().repeat_interleave(2, dim=1)
    assert added is not None
    torch.testing.assert_close(added[:, :, 0], counts.log(), atol=1e-6, rtol=0)


def test_heavy_tokens_stay_alone(model) -> None:
    ids = draw(1, 80)
    sharp = torch.zeros(WORDS)
    marked = sorted({int(ids[0, at]) for at in (20, 33, 50)})
    sharp[marked] = 1000.0
    cache, _ = read(model, Melted(budget=30, window_tokens=8, worth="information", sharp=sharp), ids, [80])
    kept = cache.what_was_kept()[0]
    assert kept.counts_BKE is not None
    for at in (20, 33, 50):
        entry = (kept.positions_BKE[0, 0] == at).nonzero()[0, 0]
        assert kept.counts_BKE[0, 0, entry] == 1


def test_information_is_the_models_own_loss(model) -> None:
    ids = draw(2, 40)
    cache, _ = read(model, Melted(budget=500), ids, [17, 1, 22])
    with torch.no_grad():
        logits = model(ids).logits
    said = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(cache.tokens.information_BL[:, 1:], said, atol=1e-4, rtol=1e-4)
    assert not cache.tokens.information_BL[:, 0].any()
    assert math.isfinite(float(logits_of(model)(torch.zeros(1, 32)).sum()))


def test_generate_reset_and_rows(model) -> None:
    ids = draw(2, 70)
    method = Melted(budget=24, window_tokens=8, every_tokens=4)
    how = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
    cache = compress(model, method)
    first = model.generate(ids, max_new_tokens=20, **how, **cache_argument(cache))
    assert first.shape == (2, 90)
    check_counts(cache, [89, 89])
    cache.reset()
    again = model.generate(ids, max_new_tokens=20, **how, **cache_argument(cache))
    assert torch.equal(first, again)
    beams = model.generate(ids, max_new_tokens=8, num_beams=3, **how, **cache_argument(compress(model, method)))
    assert beams.shape == (2, 78)
    parts = compress(model, method)
    model.generate(ids, max_new_tokens=2, prefill_chunk_size=16, **how, **cache_argument(parts))
    check_counts(parts, [71, 71])
    parts.batch_repeat_interleave(2)
    parts.batch_select_indices(torch.tensor([0, 3]))
    with torch.no_grad():
        model(draw(2, 5), use_cache=True, **cache_argument(parts))
    check_counts(parts, [76, 76])


def test_closing_takes_the_hooks_off(model) -> None:
    before = len(model.model._forward_hooks), len(model.get_input_embeddings()._forward_pre_hooks)
    with compress(model, Melted(budget=64)):
        assert len(model.model._forward_hooks) == before[0] + 1
    assert (len(model.model._forward_hooks), len(model.get_input_embeddings()._forward_pre_hooks)) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "0 of tokens_per_entry, budget, ratio and budget_bytes"),
        ({"budget": 64, "ratio": 0.5}, "2 of tokens_per_entry"),
        ({"budget": 36}, "leaves nothing between 4 sinks and a window of 32 tokens; give at least 37"),
        ({"budget": ((64, 32),)}, "all layers and heads melt to one number"),
        ({"tokens_per_entry": 0.5}, "must be at least 1"),
        ({"tokens_per_entry": 4, "worth": "gold"}, "must be both, information, attention or length"),
        ({"tokens_per_entry": 4, "sink_tokens": -1}, "must not be negative"),
        ({"tokens_per_entry": 4, "window_tokens": 0}, "window_tokens 0 must be at least 1"),
        ({"tokens_per_entry": 4, "most_tokens": 1}, "most_tokens 1 must be at least 2"),
        ({"tokens_per_entry": 4, "part_tokens": 0}, "part_tokens 0 must be at least 1"),
    ],
)
def test_impossible_settings(settings, words) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Melted(**settings)


def test_models_without_rotary_keys_are_refused() -> None:
    plain = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=WORDS))
    with pytest.raises(ValueError, match=r"no rotary embedding; keys with a position of their own cannot melt"):
        compress(plain, Melted(budget=64))


def test_embeddings_in_place_of_ids_are_refused(model) -> None:
    cache = compress(model, Melted(budget=64))
    with pytest.raises(ValueError, match="need token ids"), torch.no_grad():
        model(inputs_embeds=torch.randn(1, 5, 32), use_cache=True, **cache_argument(cache))


def test_digits_stay_sharp() -> None:
    words = ["a", "1", " 22", "b7"]
    assert sharp_tokens(lambda ids: "".join(words[i] for i in ids), 4, nats=2.0).tolist() == [0.0, 2.0, 2.0, 2.0]
