"""Padding on the right changes nothing; padding anywhere else is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.models.compat import cache_argument, cache_of


@settings(max_examples=25, deadline=None)
@given(
    grid=st.sampled_from([(8, 8), (8, 4), (8, 6), (2, 2), (None, None)]),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=3),
)
def test_right_padding_changes_no_row(make_model, draw_ids, grid, lengths) -> None:
    model = make_model(*grid)
    longest = max(lengths)
    ids = draw_ids(len(lengths), longest)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        padded = model(ids.masked_fill(~mask, 0), attention_mask=mask.long()).logits
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(padded[row, :length], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [[0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("grid", [(2, 2), (None, None)])
def test_other_padding_is_refused(make_model, draw_ids, mask, grid) -> None:
    model, ids = make_model(*grid), draw_ids(2, 4)
    with pytest.raises(ValueError, match="equal length or pad on the right"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 1], mask]))


def test_padding_before_a_continuation_is_refused(make_model, draw_ids) -> None:
    model, ids = make_model(4, 4), draw_ids(1, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    memory = cache_of(model(ids, attention_mask=mask, use_cache=True))
    with pytest.raises(ValueError, match="continuation"):
        model(ids, attention_mask=torch.cat([mask, torch.ones(1, 6)], 1).long(), **cache_argument(memory))
    with pytest.raises(ValueError, match="equal length or pad on the right"):
        model.generate(
            draw_ids(2, 6),
            attention_mask=torch.cat([mask, torch.ones_like(mask)]),
            max_new_tokens=3,
            do_sample=False,
        )


def test_a_mask_of_another_shape_is_refused(make_model, draw_ids) -> None:
    with pytest.raises(ValueError, match="4 dimensions"):
        make_model(4, 4)(draw_ids(1, 6), attention_mask=torch.zeros(1, 1, 6, 6))


def test_a_full_mask_changes_nothing(make_model, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(2, 13)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits)
