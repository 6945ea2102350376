"""Prefill in any split, token by token and one shot are the same; nothing looks ahead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.models.memory import CompressedCache

GRIDS = [(8, 8), (8, 4), (8, 6), (4, 4), (12, 12), (2, 2), (32, 16), (1, 1)]
TIGHT = {"atol": 2e-5, "rtol": 1e-4}

grids = st.sampled_from(GRIDS)
locals_ = st.sampled_from([1, 2, 3, 8, 16])


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int]]:
    tokens = draw(st.integers(1, 50))
    cuts = draw(st.sets(st.integers(1, tokens - 1), max_size=6)) if tokens > 1 else set()
    return tokens, sorted(cuts)


def assert_same_memory(one: CompressedCache, other: CompressedCache) -> None:
    for a, b in zip(one.layers, other.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        for name, tensor in a._states().items():
            torch.testing.assert_close(tensor, b._states()[name], **TIGHT, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=60, deadline=None)
@given(grid=grids, local=locals_, split=splits(), seed=st.integers(0, 3))
def test_any_split_equals_one_shot(make_model, read, draw_ids, grid, local, split, seed) -> None:
    tokens, cuts = split
    model, ids = make_model(*grid, local=local), draw_ids(2, tokens, seed)
    expected, _ = read(model, ids)
    whole, whole_memory = read(model, ids, [])
    parts, parts_memory = read(model, ids, cuts)
    torch.testing.assert_close(whole, expected, **TIGHT)
    torch.testing.assert_close(parts, expected, **TIGHT)
    assert_same_memory(parts_memory, whole_memory)


@settings(max_examples=15, deadline=None)
@given(grid=grids, local=st.integers(1, 16), tokens=st.integers(1, 40))
def test_token_by_token_equals_one_shot(make_model, read, draw_ids, grid, local, tokens) -> None:
    model, ids = make_model(*grid, local=local), draw_ids(1, tokens)
    expected, expected_memory = read(model, ids, [])
    single, memory = read(model, ids, list(range(1, tokens)))
    torch.testing.assert_close(single, expected, **TIGHT)
    assert_same_memory(memory, expected_memory)


@pytest.mark.parametrize("grid", [(8, 8), (8, 4), (8, 6)])
def test_every_cut_within_two_strides(make_model, read, draw_ids, grid) -> None:
    model, ids = make_model(*grid), draw_ids(1, 21)
    expected, _ = read(model, ids)
    for cut in range(1, 20):
        torch.testing.assert_close(read(model, ids, [cut])[0], expected, **TIGHT)


def test_bfloat16_within_its_precision(make_model, read, draw_ids) -> None:
    model = make_model(8, 4)
    half, ids = type(model)(model.config).eval(), draw_ids(1, 30)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    expected, _ = read(half, ids)
    scale = float(expected.float().abs().max())
    for cuts in ([7], [4, 9, 23], list(range(1, 30))):
        difference = (read(half, ids, cuts)[0].float() - expected.float()).abs().max()
        assert float(difference) < 0.05 * scale


@settings(max_examples=40, deadline=None)
@given(grid=grids, local=locals_, tokens=st.integers(2, 40), data=st.data())
def test_nothing_is_seen_before_its_time(make_model, read, draw_ids, grid, local, tokens, data) -> None:
    """Another token at `at` changes no earlier logits, though it changes the entry that it closes."""
    model, ids = make_model(*grid, local=local), draw_ids(1, tokens)
    at = data.draw(st.integers(1, tokens - 1))
    changed = ids.clone()
    changed[0, at] = 2 + (changed[0, at] - 1) % 50
    before, after = read(model, ids)[0], read(model, changed)[0]
    torch.testing.assert_close(after[:, :at], before[:, :at], atol=1e-6, rtol=0)
    assert not torch.allclose(after[:, at:], before[:, at:], atol=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 4), (4, 4)])
def test_an_entry_becomes_visible_when_it_closes(make_model, draw_ids, window, stride) -> None:
    """With a local window of 1 and one layer, a token is invisible until its window closes."""
    model, ids = make_model(window, stride, local=1, layers=1), draw_ids(1, 24)
    at = stride  # first token of the second stride
    changed = ids.clone()
    changed[0, at] = 2 + (changed[0, at] - 1) % 50
    with torch.no_grad():
        moved = (model(ids).logits - model(changed).logits)[0].abs().amax(dim=-1)
    closed = 2 * stride - 1
    visible = [t for t in range(24) if moved[t] > 1e-5]
    assert visible[0] == at  # the token itself
    assert visible[1] == closed
    assert visible[1:] == list(range(closed, 24))


def test_rows_do_not_depend_on_each_other(make_model, read, draw_ids) -> None:
    for grid in GRIDS:
        model, ids = make_model(*grid), draw_ids(3, 27)
        together, memory = read(model, ids, [5, 13])
        for row in range(3):
            alone, alone_memory = read(model, ids[row : row + 1], [5, 13])
            torch.testing.assert_close(together[row : row + 1], alone, **TIGHT)
            torch.testing.assert_close(memory.layers[1].keys[row : row + 1], alone_memory.layers[1].keys, **TIGHT)


def test_embeddings_instead_of_ids(make_model, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(2, 11)
    with torch.no_grad():
        by_ids = model(ids).logits
        by_embeddings = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(by_ids, by_embeddings)
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_logits_to_keep_and_hidden_states(make_model, draw_ids) -> None:
    model, ids = make_model(8, 8), draw_ids(2, 11)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
        torch.testing.assert_close(model(ids, logits_to_keep=3).logits, outputs.logits[:, -3:])
        torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, outputs.logits[:, [0, 7]])
    assert len(outputs.hidden_states) == 3
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
