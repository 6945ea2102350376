from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.proportion import proportion_confint

from isophase.statistics import (
    Observations,
    accuracy_interval,
    cross_fitted_gap,
    table_by_residue,
    wilson,
)


@given(st.integers(1, 5000), st.floats(0, 1))
def test_wilson_agrees_with_statsmodels(trials: int, share: float) -> None:
    hits = round(trials * share)
    expected = proportion_confint(hits, trials, method="wilson")
    np.testing.assert_allclose(wilson(hits, trials), expected, atol=1e-12)


def test_wilson_is_vectorised_and_knows_no_trials() -> None:
    lower, upper = wilson([0, 0, 5, 10], [0, 10, 10, 10])
    assert (lower[0], upper[0]) == (0.0, 1.0)
    assert lower[1] == 0.0
    assert upper[3] == 1.0
    with pytest.raises(ValueError, match="between 0"):
        wilson(3, 2)


def test_table_counts_by_residue_over_whole_laps() -> None:
    outcomes = np.array([[1, 0, 1, 1, 1.0], [0, 0, 1, 1, 1]])
    data = Observations(outcomes, np.array([[2], [5]]) + np.arange(5), 1)
    table = table_by_residue(data, 4)  # the fifth column is cut
    assert table.count.tolist() == [2, 2, 2, 2]
    np.testing.assert_allclose(table.mean, [1.0, 0.5, 0.5, 0.5])
    short = table_by_residue(data, 8)
    assert short.count.tolist() == [1, 1, 1, 1, 1, 2, 2, 1]
    longer = table_by_residue(data, 16)
    assert np.isnan(longer.mean[0])
    assert (longer.lower[0], longer.upper[0]) == (0.0, 1.0)


def test_table_leaves_missing_answers_out_and_takes_scores() -> None:
    data = Observations(np.array([[0.5, np.nan, -1.5, 2.0]]), np.arange(4)[None], 1)
    table = table_by_residue(data, 2)
    assert table.count.tolist() == [2, 1]
    np.testing.assert_allclose(table.mean, [-0.5, 2.0])
    assert table.lower[0] < -0.5 < table.upper[0]


def test_items_that_agree_with_themselves_widen_the_accuracy_interval() -> None:
    positions = np.arange(10) + np.zeros((20, 1), dtype=int)
    alike = Observations(np.repeat(np.arange(20)[:, None] % 2, 10, axis=1).astype(float), positions, 1)
    np.testing.assert_allclose(accuracy_interval(alike), proportion_confint(9.5, 19, method="wilson"), atol=1e-9)
    mixed = Observations(np.tile(np.arange(10) % 2, (20, 1)).astype(float), positions, 1)
    np.testing.assert_allclose(accuracy_interval(mixed), proportion_confint(100, 200, method="wilson"))
    assert accuracy_interval(Observations(np.full((1, 3), np.nan), np.arange(3)[None], 1)) == (0.0, 1.0)


@given(st.integers(0, 10_000))
def test_gap_is_symmetric(seed: int) -> None:
    """Turning right into wrong swaps best and worst and leaves the gap."""
    table = np.random.default_rng(seed).random((12, 8))
    first = cross_fitted_gap(table, splits=4, resamples=20)
    second = cross_fitted_gap(1 - table, splits=4, resamples=20)
    assert first.points == pytest.approx(second.points)
    assert first.raw_points == pytest.approx(second.raw_points)
    assert first.interval_points == pytest.approx(second.interval_points)
    assert first.interval_points[0] <= first.points <= first.interval_points[1]
    assert first.points <= first.raw_points + 1e-9


def test_gap_is_unbiased_where_max_minus_min_is_not(sim) -> None:
    rng = np.random.default_rng(0)
    gaps = [
        cross_fitted_gap(sim.draw(rng, 40, 8, trend=1.0, spread=0.5).lap_means(8), resamples=200, seed=i)
        for i in range(150)
    ]
    assert abs(np.mean([gap.points for gap in gaps])) < 1.5
    assert np.mean([gap.raw_points for gap in gaps]) > 10
    assert np.mean([gap.interval_points[0] <= 0 <= gap.interval_points[1] for gap in gaps]) > 0.93


def test_gap_of_a_planted_residue(sim) -> None:
    rng = np.random.default_rng(1)
    gaps = [
        cross_fitted_gap(sim.draw(rng, 80, 8, sim.weak_residue(8, 7, 0.5)).lap_means(8), resamples=200, seed=i)
        for i in range(60)
    ]
    assert np.mean([gap.points for gap in gaps]) == pytest.approx(50, abs=2)
    assert np.mean([gap.interval_points[0] <= 50 <= gap.interval_points[1] for gap in gaps]) > 0.85


def test_gap_of_one_item() -> None:
    gap = cross_fitted_gap(np.array([[0.0, 1.0]]))
    assert (gap.points, gap.interval_points, gap.raw_points) == (0.0, (-100.0, 100.0), 100.0)
