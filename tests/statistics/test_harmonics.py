from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import cochrans_q

from isophase.statistics import (
    Observations,
    cochran_q,
    harmonic_shares,
    harmonic_sums,
    rayleigh,
    residue_test,
)
from isophase.statistics.harmonics import shifted_totals


def binary(seed: int, items: int, window: int, start: int = 0) -> Observations:
    rng = np.random.default_rng(seed)
    positions = start + rng.integers(0, 13_440, items)[:, None] + np.arange(window)
    return Observations((rng.random((items, window)) < 0.7).astype(float), positions, 2)


@pytest.mark.parametrize(("period", "window"), [(8, 8), (8, 24), (7, 24), (5, 12), (2, 9)])
def test_harmonic_sums_follow_the_definition(period: int, window: int) -> None:
    data = binary(1, 9, window)
    columns = window // period * period
    y, x = data.outcomes[:, :columns], data.positions[:, :columns]
    expected = np.stack(
        [(y * np.exp(2j * np.pi * k * x / period)).sum(axis=1) for k in range(1, period // 2 + 1)], axis=1
    )
    np.testing.assert_allclose(harmonic_sums(data, period), expected, atol=1e-9)
    power = np.abs(expected.sum(axis=0)) ** 2
    np.testing.assert_allclose(rayleigh(expected), power / (np.abs(expected) ** 2).sum(axis=0))


def test_middle_harmonic_is_real() -> None:
    assert np.abs(harmonic_sums(binary(2, 20, 16), 8)[:, -1].imag).max() < 1e-9


@given(seed=st.integers(0, 10_000), items=st.integers(2, 30), period=st.integers(2, 17))
@settings(max_examples=40, deadline=None)
def test_q_is_cochrans_and_the_harmonics_share_it(seed: int, items: int, period: int) -> None:
    data = binary(seed, items, period)
    table = data.lap_means(period)
    varying = (table.min(axis=1) < table.max(axis=1)).any()
    q = cochran_q(table)
    assert q == pytest.approx(harmonic_shares(table).sum())  # Parseval
    if varying:
        assert q == pytest.approx(cochrans_q(table).statistic)
    else:
        assert q == 0


def test_shares_match_the_printed_formula() -> None:
    data = binary(3, 12, 8)
    table = data.lap_means(8)
    right = table.sum(axis=1)
    v = (right * (8 - right)).sum()
    test = residue_test(data, 8, shifts=9)
    np.testing.assert_allclose(test.t[:3], 2 * 7 * test.power[:3] / v)
    assert test.t[3] == pytest.approx(7 * test.power[3] / v)
    assert test.q == pytest.approx(test.t.sum())


def test_p_values_equal_a_loop_over_the_same_shifts() -> None:
    data, period, shifts = binary(4, 6, 18), 6, 199
    contrast = np.array([-0.2] * 5 + [1.0])
    test = residue_test(data, period, contrast=contrast, shifts=shifts, seed=5)
    table = data.lap_means(period)
    starts = np.random.default_rng([5, 1]).integers(0, period, size=(6, shifts))
    sums = harmonic_sums(data, period)
    hits, q_hits, contrast_hits = np.zeros(3), 0, 0
    for b in range(shifts):
        turned = sum(sums[i] * np.exp(-2j * np.pi * np.arange(1, 4) * starts[i, b] / period) for i in range(6))
        hits += np.abs(turned) ** 2 >= test.power - 1e-6
        rolled = np.stack([np.roll(table[i], -starts[i, b]) for i in range(6)])
        q_hits += cochran_q(rolled) >= test.q - 1e-9
        contrast_hits += abs(rolled.sum(axis=0) @ contrast) >= abs(table.sum(axis=0) @ contrast) - 1e-9
    np.testing.assert_allclose(test.p_values, (1 + hits) / (shifts + 1))
    assert test.q_p_value == pytest.approx((1 + q_hits) / (shifts + 1))
    assert test.contrast_p_value == pytest.approx((1 + contrast_hits) / (shifts + 1))


def test_two_items_enumerate_to_the_exact_p_value() -> None:
    """With two items only their relative shift matters: m equally likely values."""
    table = np.array([[1, 0, 0, 0], [1, 0, 0, 0]], dtype=float)
    data = Observations(table, np.array([[4, 5, 6, 7], [8, 9, 10, 11]]), 1)
    test = residue_test(data, 4, shifts=40_000)
    assert test.q_p_value == pytest.approx(0.25, abs=0.01)
    assert test.p_values[0] == pytest.approx(0.25, abs=0.01)


@given(seed=st.integers(0, 1000), move=st.integers(1, 500), period=st.sampled_from([2, 3, 4, 7, 8]))
@settings(max_examples=25, deadline=None)
def test_moving_every_position_changes_nothing(seed: int, move: int, period: int) -> None:
    here, there = binary(seed, 10, 16), binary(seed, 10, 16, start=move)
    first, second = residue_test(here, period, shifts=99), residue_test(there, period, shifts=99)
    np.testing.assert_allclose(first.z, second.z, atol=1e-9)
    assert first.q == pytest.approx(second.q)


def test_chunks_of_shifts_do_not_change_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    table = binary(6, 5, 8).lap_means(8)
    monkeypatch.setattr("isophase.statistics.harmonics._CHUNK_ELEMENTS", 64)
    parts = list(shifted_totals(table, 50, np.random.default_rng(0)))
    assert sum(len(part) for part in parts) == 50
    assert len(parts) > 1
    np.testing.assert_allclose(np.concatenate(parts).sum(axis=1), table.sum())


def test_p_values_are_uniform_under_the_null(sim) -> None:
    rng = np.random.default_rng(7)
    p = np.array(
        [residue_test(sim.draw(rng, 30, 16, trend=1.0, wobble=0.5), 8, shifts=199, seed=i).p_values for i in range(300)]
    )
    assert np.abs(np.sort(p[:, 0]) - np.arange(1, 301) / 301).max() < 0.1
    assert ((p < 0.05).mean(axis=0) < 0.095).all()


def test_constant_items_say_nothing() -> None:
    outcomes = np.array([[1.0] * 8, [0.0] * 8, [0.1] * 8])
    test = residue_test(Observations(outcomes, np.arange(8) + np.array([[3], [4], [9]]), 1), 8, shifts=99)
    assert test.q == 0
    assert (test.z == 0).all()
    assert (test.p_values == 1).all()
    assert test.q_p_value == 1


def test_bad_arguments() -> None:
    data = binary(0, 4, 8)
    with pytest.raises(ValueError, match="window has 8"):
        residue_test(data, 9)
    with pytest.raises(ValueError, match="shortest"):
        residue_test(data, 1)
    with pytest.raises(ValueError, match="shifts"):
        residue_test(data, 4, shifts=0)
    with pytest.raises(ValueError, match="no complete item"):
        residue_test(Observations(np.empty((0, 8)), np.empty((0, 8), dtype=int), 1), 4)


def test_observations_are_checked() -> None:
    ok = np.zeros((2, 3))
    with pytest.raises(ValueError, match="consecutive"):
        Observations(ok, np.array([[0, 1, 3], [0, 1, 2]]), 1)
    with pytest.raises(ValueError, match="whole numbers"):
        Observations(ok, np.zeros((2, 3)), 1)
    with pytest.raises(ValueError, match="span_tokens"):
        Observations(ok, np.arange(3) + np.zeros((2, 1), dtype=int), 0)
    with pytest.raises(ValueError, match="shape"):
        Observations(ok, np.zeros((2, 4), dtype=int), 1)
    with pytest.raises(ValueError, match="finite"):
        Observations(ok + np.inf, np.arange(3) + np.zeros((2, 1), dtype=int), 1)


def test_items_with_a_hole_are_dropped_and_counted() -> None:
    outcomes = np.ones((3, 4))
    outcomes[1, 2] = np.nan
    data = Observations(outcomes, np.arange(4) + np.array([[0], [7], [9]]), 1)
    whole = data.complete()
    assert (whole.items, whole.dropped_items, whole.complete().dropped_items) == (2, 1, 1)
    assert whole.positions[:, 0].tolist() == [0, 9]
    assert data.prompts == 11


def test_lap_means_average_the_laps_by_residue() -> None:
    data = Observations(np.arange(7.0)[None], 2 + np.arange(7)[None], 1)
    np.testing.assert_allclose(data.lap_means(3), [[(1 + 4) / 2, (2 + 5) / 2, (0 + 3) / 2]])
