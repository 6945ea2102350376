from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from statsmodels.stats.multitest import multipletests

from isophase.statistics import (
    DEFAULT_PERIODS,
    Observations,
    attribute_period,
    harmonic_sums,
    holm,
    min_p,
    scan_periods,
    without_residue_means,
)
from isophase.statistics.scan import exponential_scale


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_agrees_with_statsmodels(p: list[float]) -> None:
    np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1])


def test_holm_refuses_what_is_no_probability() -> None:
    with pytest.raises(ValueError, match="numbers in 0"):
        holm([0.2, 1.2])
    with pytest.raises(ValueError, match="numbers in 0"):
        holm([float("nan")])


def test_min_p_against_its_definition() -> None:
    draws = np.round(np.random.default_rng(0).exponential(size=(400, 5)), 1)  # with ties
    draws[0] = [0.1, 9.0, 4.0, 1.0, 0.0]
    found = min_p(draws)
    ranks = np.array([[(draws[:, k] >= draws[b, k]).mean() for k in range(5)] for b in range(400)])
    smallest = ranks.min(axis=1)
    np.testing.assert_allclose(found.p_values, ranks[0])
    np.testing.assert_allclose(found.p_adjusted, [(smallest <= p).mean() for p in ranks[0]])
    assert ((draws[0] >= found.critical) == (found.p_adjusted <= 0.05)).all()


def test_scan_statistics_against_a_loop(sim) -> None:
    data = sim.draw(np.random.default_rng(1), 12, 24)
    periods, shifts = [2, 3, 8], 150
    scan = scan_periods(data, periods, shifts=shifts, seed=3)
    moves = np.random.default_rng([3, 2]).integers(0, 24, size=(shifts, 12))
    draws = np.zeros((shifts + 1, 3))
    for column, period in enumerate(periods):
        sums = harmonic_sums(data, period)[:, 0]
        scatter = (np.abs(sums) ** 2).sum()
        draws[0, column] = abs(sums.sum()) ** 2 / scatter
        for b in range(shifts):
            turned = (sums * np.exp(2j * np.pi * moves[b] / period)).sum()
            draws[b + 1, column] = abs(turned) ** 2 / scatter
    draws[:, 0] = -chi2.logsf(draws[:, 0], 1)
    expected = min_p(np.round(draws, 9))
    np.testing.assert_allclose([test.z for test in scan.tests], draws[0], atol=1e-8)
    np.testing.assert_allclose([test.p_value for test in scan.tests], expected.p_values)
    np.testing.assert_allclose([test.p_adjusted for test in scan.tests], expected.p_adjusted)
    assert scan.line_z == pytest.approx(np.quantile(draws.max(axis=1), 0.95))


def test_period_two_is_carried_to_the_common_scale() -> None:
    z = np.array([0.0, 1.0, chi2.isf(0.01, 1)])
    np.testing.assert_allclose(np.exp(-exponential_scale(z, 2)), chi2.sf(z, 1))
    assert exponential_scale(z, 3) is z


def test_controls_and_periods_that_do_not_fit(sim) -> None:
    data = sim.draw(np.random.default_rng(2), 10, 24)
    scan = scan_periods(data, controls=(10,), shifts=99)
    assert [test.period_tokens for test in scan.tests] == [2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert [test.period_tokens for test in scan.tests if test.control] == [3, 5, 7, 10]
    # One lap of 16 would leave a third of the window unread.
    assert scan.untestable == (16, 32, 64, 128)
    assert scan_periods(data, [50], shifts=9).tests == ()
    with pytest.raises(ValueError, match="shortest"):
        scan_periods(data, [1])


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_a_pure_period_is_named(sim, period: int) -> None:
    window = 32 if period == 16 else 24
    data = sim.draw(np.random.default_rng(period), 120, window, sim.sinusoid(period, 0.15))
    assert scan_periods(data, shifts=999).period_tokens == period


@pytest.mark.parametrize(("period", "residue"), [(4, 3), (4, 0), (8, 7), (8, 2), (12, 11), (16, 15)])
def test_one_weak_residue_is_named_by_its_own_period(sim, period: int, residue: int) -> None:
    data = sim.draw(np.random.default_rng(period), 120, 48, sim.weak_residue(period, residue, 0.5))
    scan = scan_periods(data, shifts=999)
    assert scan.period_tokens == period
    if period == 8:
        hit = {test.period_tokens for test in scan.tests if test.p_adjusted < 0.05}
        assert {8, 4, 2} <= hit


def test_a_multiple_is_named_when_only_its_residues_tell(sim) -> None:
    """One dead phase in 32: harmonic 1 is weak everywhere, Cochran's Q on the rest is not."""
    data = sim.draw(np.random.default_rng(5), 60, 64, sim.weak_residue(32, 31, 0.8))
    assert scan_periods(data, shifts=999).period_tokens == 32


def test_attribution_takes_the_least_remainder_when_nothing_explains_all(sim) -> None:
    rng = np.random.default_rng(6)
    data = sim.draw(rng, 200, 28, lambda x: sim.sinusoid(4, 0.18)(x) + sim.sinusoid(7, 0.05)(x))
    assert attribute_period(data, [4, 7], {4: 5.0, 7: 5.0}) == 4
    assert attribute_period(data, [], {}) is None


def test_residue_means_take_their_harmonics_along(sim) -> None:
    data = sim.draw(np.random.default_rng(7), 50, 24, sim.weak_residue(8, 3, 0.6))
    rest = without_residue_means(data, 8)
    for period in (2, 4, 8):
        assert np.abs(harmonic_sums(rest, period).sum(axis=0)).max() < 1e-9


def test_constant_outcomes_do_not_crash() -> None:
    data = Observations(np.ones((5, 16)), np.arange(16) + np.arange(5)[:, None], 1)
    scan = scan_periods(data, shifts=99)
    assert scan.period_tokens is None
    assert all(test.z == 0 and test.p_value == 1 for test in scan.tests)


def test_odd_periods_stay_quiet_under_an_even_effect(sim) -> None:
    rng = np.random.default_rng(8)
    hits = 0
    for seed in range(40):
        scan = scan_periods(sim.draw(rng, 60, 24, sim.sinusoid(8, 0.15)), shifts=499, seed=seed)
        hits += any(test.control and test.p_adjusted < 0.05 for test in scan.tests)
    assert hits <= 4
    assert {3, 5, 7} < set(DEFAULT_PERIODS)
