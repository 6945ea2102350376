"""Packing: every token of every chunk in one row of its slot, sums and softmax by chunk, few empty rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.chunking.layout import ChunkLayout
from isophase.chunking.packing import pack, segment_softmax, segment_sum
from isophase.chunking.rules import ChunkRule, FixedStride, LocalMaximum, TokenHash, TokenRanks
from isophase.probes.lexicon import PROSE


def layout_of(rule: ChunkRule, ids: torch.Tensor) -> ChunkLayout:
    flags, _ = rule.starts(ids)
    layout, _ = ChunkLayout.from_flags(flags, rule.lookahead_tokens, 0, torch.zeros(len(ids), dtype=torch.long))
    return layout


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 60), st.integers(0, 3), st.sampled_from([1, 8, 16, 32]), st.booleans())
def test_rows_are_the_slots_of_the_layout(rows: int, tokens: int, overlap: int, multiple: int, shared: bool) -> None:
    ids = torch.randint(0, 50, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    rule = FixedStride(stride_tokens=5) if shared else LocalMaximum(score=TokenHash(), radius_tokens=2, max_tokens=7)
    layout = layout_of(rule, ids[:1] if shared else ids)
    window = rule.max_tokens + overlap
    plan = pack(layout, rows, tokens, window, overlap_tokens=overlap, multiple_of=multiple)
    position, filled = layout.slots(window, overlap)
    expected = [
        (slot, row * tokens + int(position[own, entry, slot]), row * layout.entries + entry)
        for slot in range(window)
        for row in range(rows)
        for own in [0 if shared else row]
        for entry in range(layout.entries)
        if filled[own, entry, slot]
    ]
    found = [
        (slot, int(plan.token_R[r]), int(plan.chunk_R[r]))
        for slot, place in enumerate(plan.slots())
        for r in range(place.start, place.stop)
        if plan.chunk_R[r] < plan.chunks
    ]
    assert found == expected
    assert plan.used == len(expected)
    assert all(bound % multiple == 0 for bound in plan.bounds)
    assert plan.rows - plan.used < window * multiple


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_segments_are_sums_and_softmaxes(rows: int, chunks: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    scores = 30 * torch.randn(rows, channels, generator=generator)
    chunk = torch.randint(0, chunks + 1, (rows,), generator=generator)
    weights = segment_softmax(scores, chunk, chunks)
    sums = segment_sum(weights * scores, chunk, chunks)
    for number in range(chunks):
        own = chunk == number
        expected = torch.softmax(scores[own], dim=0)
        torch.testing.assert_close(weights[own], expected)
        torch.testing.assert_close(sums[number], (expected * scores[own]).sum(dim=0))


@pytest.mark.parametrize("multiple", [8, 16])
def test_nine_rows_in_ten_are_used_on_text_with_the_delimiter_rule(multiple: int) -> None:
    words = 4 * PROSE.split()  # some 3,000 tokens
    known = sorted({word.strip(",.;:") for word in words})
    ids = torch.tensor([[1 + known.index(word.strip(",.;:")) if word[-1] not in ",.;:" else 0 for word in words]])
    rule = LocalMaximum(score=TokenRanks(ranks=(1,)), radius_tokens=4, max_tokens=16)
    plan = pack(layout_of(rule, ids), 1, ids.shape[1], rule.max_tokens, multiple_of=multiple)
    assert plan.utilisation >= 0.9
    assert plan.used > 0.98 * ids.shape[1]


def test_a_multiple_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple_of 0"):
        pack(layout_of(FixedStride(stride_tokens=2), torch.zeros(1, 8)), 1, 8, 2, multiple_of=0)
