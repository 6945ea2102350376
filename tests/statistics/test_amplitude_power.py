from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, ncx2

from isophase.statistics import (
    Observations,
    amplitude_upper,
    constant_upper,
    debiased_amplitude,
    detectable_amplitude,
    estimate_amplitude,
    noncentrality,
    noncentrality_upper,
    predicted_power,
    prompts_needed,
    prompts_to_bound,
)


@given(st.floats(1.5, 5000), st.sampled_from([1, 2]))
def test_upper_noncentrality_inverts_ncx2(value: float, degrees: int) -> None:
    assert ncx2.cdf(value, degrees, noncentrality_upper(value, degrees)) == pytest.approx(0.05, rel=1e-4)


def test_upper_noncentrality_of_large_and_small_values() -> None:
    assert noncentrality_upper(1e4 * 0.9999) == pytest.approx(noncentrality_upper(1e4 * 1.0001), rel=1e-3)
    assert noncentrality_upper(0.0) == noncentrality_upper(float(chi2.median(2)))


@pytest.mark.parametrize("period", [2, 5, 8])
def test_a_noiseless_curve_is_recovered(period: int) -> None:
    positions = np.arange(3 * period) + np.arange(17)[:, None]
    phase = 0.0 if period == 2 else 0.7
    curve = 0.6 + 0.2 * np.cos(2 * np.pi * positions / period - phase)
    found = estimate_amplitude(Observations(curve, positions, 1), period)
    assert found.amplitude == pytest.approx(0.2)
    assert found.phase_radians == pytest.approx(phase, abs=1e-9)
    assert found.degrees == (1 if period == 2 else 2)
    assert found.debiased < found.amplitude < found.upper


def test_variance_is_the_printed_formula(sim) -> None:
    data = sim.draw(np.random.default_rng(0), 40, 8)
    right = data.outcomes.sum(axis=1)
    found = estimate_amplitude(data, 8)
    assert found.variance == pytest.approx((right * (8 - right)).sum() / (40 * 8 * 7))
    assert found.noise_variance >= found.variance
    assert found.debiased == debiased_amplitude(found.amplitude, found.noise_variance, 320)


@pytest.mark.parametrize("period", [2, 8])
def test_debiasing_is_right_on_average_and_the_limit_covers(sim, period: int) -> None:
    rng = np.random.default_rng(1)
    found = [estimate_amplitude(sim.draw(rng, 60, 8, sim.sinusoid(period, 0.05)), period) for _ in range(400)]
    squares = [f.amplitude**2 - (4 if f.degrees == 2 else 1) * f.variance / f.prompts for f in found]
    assert np.mean(squares) == pytest.approx(0.05**2, rel=0.15)
    assert np.mean([f.upper >= 0.05 for f in found]) >= 0.93


def test_constant_outcomes() -> None:
    assert amplitude_upper(0.0, 0.0, 100) == 0.0
    assert constant_upper(300) == pytest.approx(0.00994, abs=1e-4)  # rule of three
    found = estimate_amplitude(Observations(np.ones((10, 8)), np.arange(8) + np.arange(10)[:, None], 1), 8)
    assert (found.amplitude, found.variance, found.upper) == (0.0, 0.0, constant_upper(80))


def test_one_miss_among_many_hits_does_not_shrink_the_limit() -> None:
    outcomes = np.ones((25, 8))
    outcomes[3, 4] = 0
    found = estimate_amplitude(Observations(outcomes, np.arange(8) + np.arange(25)[:, None], 1), 8)
    assert found.upper > constant_upper(200)


def test_published_noncentralities() -> None:
    assert noncentrality(0.9, 0.05) == pytest.approx(12.65, abs=0.005)
    assert noncentrality(0.8, 0.05) == pytest.approx(9.63, abs=0.006)
    assert ncx2.sf(chi2.isf(0.01, 1), 1, noncentrality(0.7, 0.01, 1)) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("v", "amplitude", "prompts"),
    [(0.16, 0.05, 1620), (0.16, 0.10, 405), (0.10, 0.05, 1012), (0.10, 0.10, 253)],
)
def test_published_prompts(v: float, amplitude: float, prompts: int) -> None:
    assert prompts_needed(v, amplitude) == prompts
    assert predicted_power(prompts, v, amplitude) == pytest.approx(0.9, abs=0.002)
    assert detectable_amplitude(prompts, v) == pytest.approx(amplitude, rel=0.002)


@pytest.mark.parametrize("degrees", [1, 2])
@pytest.mark.parametrize("window", [None, 24])
def test_the_plan_is_consistent(window: int | None, degrees: int) -> None:
    plan = {"tests": 3, "window_tokens": window, "degrees": degrees}
    prompts = prompts_needed(0.16, 0.08, **plan)
    assert predicted_power(prompts, 0.16, 0.08, **plan) == pytest.approx(0.9, abs=0.003)
    assert detectable_amplitude(prompts, 0.16, **plan) == pytest.approx(0.08, rel=0.005)
    assert prompts > prompts_needed(0.16, 0.08, degrees=degrees)


def test_too_few_windows_can_find_nothing() -> None:
    assert detectable_amplitude(48, 0.16, tests=12, window_tokens=24) == np.inf


def test_prompts_to_bound() -> None:
    prompts = prompts_to_bound(0.16, 0.02)
    assert prompts is not None
    assert amplitude_upper(0.0, 0.16, prompts) == pytest.approx(0.02, rel=1e-3)
    further = prompts_to_bound(0.16, 0.02, 0.01)
    assert further is not None
    assert further > prompts
    assert prompts_to_bound(0.16, 0.02, 0.02) is None
    assert prompts_to_bound(1e-9, 0.5) == 1


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="above 0"):
        prompts_needed(0.0, 0.1)
    with pytest.raises(ValueError, match="power"):
        prompts_needed(0.1, 0.1, 1.0)
    with pytest.raises(ValueError, match="alpha"):
        predicted_power(100, 0.1, 0.1, alpha=0.0)
    with pytest.raises(ValueError, match="tests"):
        detectable_amplitude(100, 0.1, tests=0)
    with pytest.raises(ValueError, match="prompts"):
        predicted_power(0, 0.1, 0.1)
    with pytest.raises(ValueError, match="margin"):
        prompts_to_bound(0.1, 0.0)
