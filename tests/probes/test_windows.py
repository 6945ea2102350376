from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.probes.windows import window_starts


def positions_by_residue(starts: np.ndarray, m: int) -> np.ndarray:
    """[items, m]: the position at which each item meets each residue."""
    positions = starts[:, None] + np.arange(m)
    return np.take_along_axis(positions, np.argsort(positions % m, axis=1), axis=1)


@given(
    m=st.integers(1, 40),
    items=st.integers(1, 200),
    earliest=st.integers(0, 500),
    extra=st.integers(0, 500),
    seed=st.integers(0, 99),
)
def test_all_positions_in_range_and_every_residue_once(m, items, earliest, extra, seed):
    latest = earliest + 4 * m - 4 + extra
    starts = window_starts(items, m, earliest, latest, seed)
    assert starts.shape == (items,)
    assert starts.min() >= earliest
    assert starts.max() + m - 1 <= latest
    by_residue = positions_by_residue(starts, m)
    assert (by_residue % m == np.arange(m)).all()
    assert (starts == window_starts(items, m, earliest, latest, seed)).all()


@pytest.mark.parametrize("m", [2, 3, 5, 8, 16])
def test_mean_and_variance_equal_when_base_is_constant(m):
    starts = window_starts(2 * m * m, m, 1, 3 * m - 2, seed=3)  # room for one base only
    for half in (starts[: m * m], starts[m * m :]):
        by_residue = positions_by_residue(half, m)
        sums, squares = by_residue.sum(axis=0), (by_residue**2).sum(axis=0)
        assert len(set(sums.tolist())) == 1
        assert len(set(squares.tolist())) == 1
        assert by_residue.var(axis=0) == pytest.approx((m * m - 1) / 4)


@given(m=st.integers(1, 20), blocks=st.integers(1, 12), seed=st.integers(0, 99))
def test_mean_equal_for_any_multiple_of_m_items(m, blocks, seed):
    by_residue = positions_by_residue(window_starts(m * blocks, m, 100, 5000, seed), m)
    assert len(set(by_residue.sum(axis=0).tolist())) == 1


def test_start_residues_are_balanced():
    starts = window_starts(80, 8, 0, 10_000, seed=0)
    assert np.bincount(starts % 8).tolist() == [10] * 8
    assert (starts != window_starts(80, 8, 0, 10_000, seed=1)).any()


def test_plain_starts_would_not_match_variances():
    """Why the dither exists."""
    m = 8
    variances = positions_by_residue(np.arange(m), m).var(axis=0)
    assert variances.max() > 10 * max(variances.min(), 1)


def test_too_little_room_is_an_error_with_numbers():
    with pytest.raises(IsophaseError, match=r"16 positions need 61 tokens.*and 21 are free.*--length"):
        window_starts(4, 16, 10, 30, seed=0)
