"""The fixed grid: every token in exactly one stride and in `W/S` windows, none visible too early."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.chunking.layout import ChunkLayout, FixedGrid
from isophase.chunking.rules import FixedStride


@st.composite
def grids(draw: st.DrawFn) -> FixedGrid:
    window = draw(st.integers(1, 40))
    return FixedGrid(window_tokens=window, stride_tokens=draw(st.integers(1, window)))


def windows(grid: FixedGrid, length: int) -> list[range]:
    """Token positions of every closed entry, from the class's description alone."""
    closed = []
    for entry in range(length):
        last = (entry + 1) * grid.stride_tokens - 1
        if last < length:
            closed.append(range(max(0, last - grid.window_tokens + 1), last + 1))
    return closed


def layout_of(grid: FixedGrid, length: int) -> ChunkLayout:
    rule = FixedStride(stride_tokens=grid.stride_tokens)
    flags, _ = rule.starts(torch.zeros(1, length))
    layout, _ = ChunkLayout.from_flags(flags, rule.lookahead_tokens, 0, torch.zeros(1, dtype=torch.long))
    return layout


@settings(deadline=None)
@given(grids(), st.integers(0, 200))
def test_slots_are_the_windows_that_have_closed(grid: FixedGrid, length: int) -> None:
    layout, expected = layout_of(grid, length), windows(grid, length)
    assert layout.close_BE[0].tolist() == [window[-1] for window in expected]
    assert layout.start_BE[0].tolist() == [window[-1] + 1 - grid.stride_tokens for window in expected]
    position, filled = layout.slots(grid.window_tokens, grid.overlap_tokens)
    assert [position[0, e][filled[0, e]].tolist() for e in range(layout.entries)] == [list(w) for w in expected]
    # Windows are aligned at their last slot: it is always filled.
    assert bool(filled[0, :, -1].all())


@settings(deadline=None)
@given(grids(), st.integers(1, 300))
def test_phase_is_the_place_within_the_stride(grid: FixedGrid, length: int) -> None:
    positions = torch.arange(length)[None]
    phases = layout_of(grid, length).phase(positions)[0].tolist()
    closed = length // grid.stride_tokens * grid.stride_tokens
    assert phases == [t % grid.stride_tokens if t < closed else -1 for t in range(length)]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 150))
def test_tokens_far_from_the_ends_lie_in_w_over_s_windows(stride: int, times: int, length: int) -> None:
    closed = windows(FixedGrid(window_tokens=stride * times, stride_tokens=stride), length)
    # The last windows that would cover a token may not have closed yet.
    for token in range(len(closed) * stride - (times - 1) * stride):
        assert sum(token in window for window in closed) == times


def test_overlap() -> None:
    assert FixedGrid(window_tokens=8, stride_tokens=4).overlap_tokens == 4
    assert FixedGrid(window_tokens=128, stride_tokens=128).overlap_tokens == 0


@pytest.mark.parametrize(
    ("window", "stride", "words"),
    [(4, 8, ["stride 8", "window 4", "at most"]), (4, 0, ["stride 0", "at least 1"]), (0, -1, ["stride -1"])],
)
def test_impossible_grids_are_refused(window: int, stride: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        FixedGrid(window_tokens=window, stride_tokens=stride)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
