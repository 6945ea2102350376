"""The fixed grid: every token in exactly one stride and in `W/S` windows, none visible too early."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isophase.chunking.layout import FixedGrid


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


@given(grids(), st.integers(0, 200))
def test_every_token_lies_in_exactly_one_stride(grid: FixedGrid, length: int) -> None:
    count = grid.entries(length)
    close, anchor = grid.close(0, count), grid.anchor(0, count)
    strides = [list(range(int(a), int(c) + 1)) for a, c in zip(anchor, close, strict=True)]
    assert [t for stride in strides for t in stride] == list(range(count * grid.stride_tokens))
    assert 0 <= length - count * grid.stride_tokens < grid.stride_tokens  # the rest waits for its entry


@given(grids(), st.integers(0, 200))
def test_entries_are_the_windows_that_have_closed(grid: FixedGrid, length: int) -> None:
    expected = windows(grid, length)
    assert grid.entries(length) == len(expected)
    assert grid.close(0, len(expected)).tolist() == [w[-1] for w in expected]
    assert all(c < length for c in grid.close(0, len(expected)).tolist())


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 150))
def test_tokens_far_from_the_ends_lie_in_w_over_s_windows(stride: int, times: int, length: int) -> None:
    grid = FixedGrid(window_tokens=stride * times, stride_tokens=stride)
    closed = windows(grid, length)
    # The last windows that would cover a token may not have closed yet.
    for token in range(grid.entries(length) * stride - (times - 1) * stride):
        assert sum(token in window for window in closed) == times


@given(grids(), st.integers(0, 30), st.integers(0, 30))
def test_a_range_of_entries_is_the_slice_of_all(grid: FixedGrid, first: int, more: int) -> None:
    last = first + more
    assert torch.equal(grid.close(first, last), grid.close(0, last)[first:])
    assert torch.equal(grid.anchor(first, last), grid.anchor(0, last)[first:])


@given(grids(), st.integers(0, 1000))
def test_phase_is_the_place_within_the_stride(grid: FixedGrid, position: int) -> None:
    phase = int(grid.phase(torch.tensor(position)))
    assert phase == position % grid.stride_tokens
    # At the boundary phase, and nowhere else, an entry closes.
    closes = position in grid.close(0, grid.entries(position + 1)).tolist()
    assert closes == (phase == grid.stride_tokens - 1)


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
