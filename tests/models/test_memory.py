"""The memory as a cache layer: logical length, few entries, and every operation of a cache."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from isophase.models.compat import cache_argument, cache_of
from isophase.models.memory import CompressedCache

TIGHT = {"atol": 2e-5, "rtol": 1e-4}


@settings(max_examples=40, deadline=None)
@given(
    grid=st.sampled_from([(8, 8), (8, 4), (8, 6), (4, 4), (2, 2), (32, 16)]),
    local=st.integers(1, 16),
    tokens=st.integers(1, 60),
    cut=st.integers(1, 60),
)
def test_stores_one_entry_per_stride(make_model, read, draw_ids, grid, local, tokens, cut) -> None:
    window, stride = grid
    model = make_model(window, stride, local=local)
    _, memory = read(model, draw_ids(2, tokens), [cut] if cut < tokens else [])
    assert memory.get_seq_length() == tokens
    entries, kept = tokens // stride, min(local - 1, tokens)
    still_open = min(tokens, stride - 1 + window - stride)
    for layer in memory.layers:
        assert layer.keys.shape == layer.values.shape == (2, 2, entries, 8)
        assert layer.local_keys.shape == layer.local_values.shape == (2, 2, kept, 8)
        assert layer.open_hidden.shape == (2, still_open, 24)
        exact = 4 * 2 * (2 * 2 * 8 * (entries + kept) + 24 * still_open)
        spare = 2 * (1 + entries // 64) * 16 * 2 * 2 * 8 * 4 + 1024  # unfinished and waiting pages; tables
        assert exact <= layer.stored_bytes() <= exact + spare
        assert layer.get_mask_sizes(3) == (tokens + 3, 0)


def test_memory_really_shrinks(make_model, read, draw_ids) -> None:
    """No tensor is a view that keeps the whole prompt alive."""
    _, memory = read(make_model(8, 8, local=4), draw_ids(1, 400), [])
    for layer in memory.layers:
        held = sum(t.untyped_storage().nbytes() for t in layer._states().values()) + layer.pages.stored_bytes()
        assert held == layer.stored_bytes()
        assert held < 0.25 * 400 * 2 * 2 * 8 * 4  # exact keys and values


def test_reset_forgets_everything(make_model, read, draw_ids) -> None:
    """A short prompt after another request reads as on a fresh memory (a fault reported elsewhere)."""
    model = make_model(8, 4)
    for tokens in (1, 2, 3, 4, 5, 9):
        _, memory = read(model, draw_ids(1, 21, seed=1), [10])
        memory.reset()
        assert memory.get_seq_length() == 0
        assert all(layer.stored_bytes() == 0 for layer in memory.layers)
        again, _ = read(model, draw_ids(1, tokens), [], memory)
        fresh, _ = read(model, draw_ids(1, tokens), [])
        assert torch.equal(again, fresh)


@pytest.mark.parametrize("tokens", [1, 3, 4, 11])
def test_reorder_select_and_repeat(make_model, read, draw_ids, tokens) -> None:
    model = make_model(8, 4)
    ids, more = draw_ids(3, tokens), draw_ids(6, 9, seed=5)

    def continued(rows: list[int], memory: CompressedCache) -> None:
        tail = more[: len(rows)]
        expected, _ = read(model, torch.cat([ids[rows], tail], dim=1))
        logits, _ = read(model, tail, [2], memory)
        torch.testing.assert_close(logits, expected[:, tokens:], **TIGHT)

    def fresh() -> CompressedCache:
        return read(model, ids, [])[1]

    memory = fresh()
    memory.reorder_cache(torch.tensor([2, 0, 0]))
    continued([2, 0, 0], memory)
    memory = fresh()
    memory.batch_select_indices(torch.tensor([1]))
    continued([1], memory)
    memory = fresh()
    memory.batch_repeat_interleave(2)
    continued([0, 0, 1, 1, 2, 2], memory)


def test_copies_are_independent(make_model, read, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(1, 14)
    _, memory = read(model, ids[:, :9], [])
    twin = copy.deepcopy(memory)
    read(model, draw_ids(1, 7, seed=3), [], memory)
    logits, _ = read(model, ids[:, 9:], [], twin)
    torch.testing.assert_close(logits, read(model, ids)[0][:, 9:], **TIGHT)


def test_what_it_cannot_do_raises(make_model, read, draw_ids) -> None:
    _, memory = read(make_model(8, 4), draw_ids(1, 14), [])
    layer = memory.layers[0]
    before = {name: tensor.clone() for name, tensor in layer._states().items()}
    with pytest.raises(ValueError, match=r"cannot be cropped by -3: 0 tokens.*activate_past_recording"):
        memory.crop(-3)
    with pytest.raises(ValueError, match="cannot be cropped alone"):
        layer.crop(5)
    memory.crop(0)
    with pytest.raises(TypeError, match="append"):
        memory.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    assert layer.is_croppable is False
    assert layer.get_seq_length() == 14
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer._states().items())


def test_another_kind_of_cache_is_refused(make_model, draw_ids) -> None:
    with pytest.raises(TypeError, match="DynamicCache cannot hold compressed entries"):
        make_model(8, 4)(draw_ids(1, 5), **cache_argument(DynamicCache()))


def test_a_memory_is_made_on_request_and_never_in_training(make_model, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(1, 9)
    assert isinstance(cache_of(model(ids)), CompressedCache)
    assert cache_of(model(ids, use_cache=False)) is None
    trained = type(model)(model.config).train()
    assert cache_of(trained(ids)) is None


def test_the_older_name_of_the_cache_works(make_model, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(1, 9)
    with torch.no_grad():
        memory = CompressedCache(model.config)
        model(ids[:, :5], past_key_values=memory, use_cache=True)
        logits = model(ids[:, 5:], past_key_values=memory, use_cache=True).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 5:], **TIGHT)
        memory = CompressedCache(model.config)
        model.model(ids[:, :5], past_key_values=memory)
    assert memory.get_seq_length() == 5


def test_without_compression_it_is_an_ordinary_cache(make_model, read, draw_ids) -> None:
    model, ids = make_model(None, None), draw_ids(2, 17)
    expected, _ = read(model, ids)
    logits, memory = read(model, ids, [4, 11])
    torch.testing.assert_close(logits, expected, **TIGHT)
    assert memory.layers[0].keys.shape == (2, 2, 17, 8)
    memory.crop(-6)
    again, _ = read(model, ids[:, 11:], [], memory)
    torch.testing.assert_close(again, expected[:, 11:], **TIGHT)
