from __future__ import annotations

import time
from dataclasses import asdict, replace

import numpy as np
import pytest

from isophase.statistics import Observations, assess, constant_upper

FAST = {"shifts": 999, "resamples": 200}


def constant(value: float, items: int, window: int = 24) -> Observations:
    starts = np.random.default_rng(0).integers(0, 13_440, items)
    return Observations(np.full((items, window), value), starts[:, None] + np.arange(window), 2)


def test_known_stride_finds_a_sinusoid(sim) -> None:
    data = sim.draw(np.random.default_rng(0), 100, 24, sim.sinusoid(8, 0.12, 1.0))
    found = assess(data, 8, **FAST)
    assert found.verdict == "sensitive"
    assert found.reasons[0] == "harmonic_significant"
    assert (found.period_tokens, found.axis_tokens, found.more_prompts_to_decide) == (8, 8, 0)
    assert set(found.p_values) == {"harmonic", "omnibus", "boundary"}
    assert found.amplitude_debiased == pytest.approx(0.12, abs=0.03)
    assert found.amplitude_debiased <= found.amplitude <= found.amplitude_upper
    assert found.harmonic_phase_radians == pytest.approx(1.0, abs=0.3)
    assert found.effect == pytest.approx(max(found.amplitude_debiased, found.gap_points / 200))
    assert found.boundary_phases == [7]
    assert found.scan_period_tokens == 8
    assert sum(found.prompts_by_phase) == found.prompts == 2400
    assert found.accuracy_by_phase[found.worst_phase] == min(found.accuracy_by_phase)
    assert found.worst_phase in found.weak_phases


def test_two_tests_where_no_phase_straddles(sim) -> None:
    data = sim.draw(np.random.default_rng(1), 40, 24, span=1)
    found = assess(data, 8, **FAST)
    assert found.boundary is None
    assert found.boundary_phases == []
    assert set(found.p_values_adjusted) == {"harmonic", "omnibus"}


@pytest.mark.parametrize("stride", [128, None])
def test_one_dead_phase_in_128_is_not_called_none(sim, stride: int | None) -> None:
    """Its amplitude is 2 / 128 of its depth, below the margin; its effect is half its depth."""
    data = sim.draw(np.random.default_rng(2), 40, 128, sim.weak_residue(128, 127, 0.8), accuracy=0.9)
    found = assess(data, stride, **FAST)
    assert found.amplitude_debiased < found.margin
    assert found.verdict != "none"
    if stride:
        assert found.verdict == "sensitive"
        assert "boundary_significant" in found.reasons
        assert found.effect > 0.25
        assert found.worst_phase == 127


def test_unknown_stride_names_the_period(sim) -> None:
    data = sim.draw(np.random.default_rng(3), 100, 24, sim.weak_residue(8, 7, 0.5))
    found = assess(data, None, **FAST)
    assert (found.verdict, found.period_tokens, found.axis_tokens) == ("sensitive", 8, 8)
    assert found.reasons == ["scan_significant", "periods_untestable"]
    assert found.p_values.keys() == {"scan"}
    assert found.boundary is not None
    assert found.worst_phase == 7
    assert found.gap_interval_points[0] < 50 < found.gap_interval_points[1]


def test_a_stride_that_is_not_the_period_is_said(sim) -> None:
    data = sim.draw(np.random.default_rng(4), 100, 24, sim.sinusoid(4, 0.15))
    found = assess(data, 8, **FAST)
    assert (found.verdict, found.period_tokens) == ("sensitive", 8)
    assert "shorter_period_explains" in found.reasons
    odd = sim.draw(np.random.default_rng(4), 100, 24, sim.sinusoid(5, 0.15))
    assert {"other_period_found", "control_period_found"} <= set(assess(odd, 8, **FAST).reasons)


def test_null_is_none_with_enough_prompts_and_inconclusive_before(sim) -> None:
    small = assess(sim.draw(np.random.default_rng(5), 40, 24), 8, **FAST)
    assert small.verdict == "inconclusive"
    assert small.reasons == ["nothing_significant", "upper_limit_above_margin"]
    assert small.more_prompts_to_decide is not None
    assert small.more_prompts_to_decide % 24 == 0
    enough = (small.prompts + small.more_prompts_to_decide) // 24
    large = assess(sim.draw(np.random.default_rng(6), 2 * enough, 24), 8, **FAST)
    assert large.verdict == "none"
    assert large.deciding_upper == large.amplitude_upper < large.margin
    assert large.more_prompts_to_decide == 0


def test_after_a_scan_the_largest_limit_decides(sim) -> None:
    found = assess(sim.draw(np.random.default_rng(7), 60, 24), None, **FAST)
    assert found.period_tokens is None
    assert found.axis_tokens == 8
    assert found.boundary is None
    assert found.deciding_upper == max(test.amplitude_upper for test in found.scan if not test.control)
    assert assess(sim.draw(np.random.default_rng(7), 60, 24), None, margin=0.2, **FAST).verdict == "none"


def test_a_real_effect_below_the_margin_stays_inconclusive(sim) -> None:
    data = sim.draw(np.random.default_rng(8), 60, 24, sim.sinusoid(8, 0.12))
    found = assess(data, 8, margin=0.3, **FAST)
    assert found.verdict == "inconclusive"
    assert found.reasons[-1] == "effect_below_margin"
    assert found.more_prompts_to_decide is None


def test_all_right_is_none_only_with_enough_prompts() -> None:
    few, many = assess(constant(1.0, 5), 8, **FAST), assess(constant(1.0, 10), 8, **FAST)
    assert few.verdict == "inconclusive"
    assert few.amplitude_upper == constant_upper(120) > 0.02
    assert few.more_prompts_to_decide == 48
    assert many.verdict == "none"
    assert many.reasons == ["upper_limit_below_margin", "near_ceiling"]
    assert (many.worst_phase, many.weak_phases, many.gap_points) == (None, [], 0.0)
    assert assess(constant(1.0, 10), None, **FAST).verdict == "none"


def test_nothing_right_is_inconclusive() -> None:
    found = assess(constant(0.0, 100), 8, **FAST)
    assert (found.verdict, found.reasons, found.more_prompts_to_decide) == (
        "inconclusive",
        ["accuracy_zero"],
        None,
    )


def test_items_that_are_all_right_or_all_wrong() -> None:
    data = constant(1.0, 20)
    data.outcomes[::2] = 0.0
    found = assess(data, 8, **FAST)
    assert found.verdict == "none"
    assert found.accuracy == 0.5
    assert found.amplitude_debiased == 0.0


def test_missing_answers_drop_items(sim) -> None:
    data = sim.draw(np.random.default_rng(9), 30, 24, sim.sinusoid(8, 0.2))
    data.outcomes[[3, 7], 5] = np.nan
    found = assess(data, 8, **FAST)
    assert (found.items, found.dropped_items) == (28, 2)
    assert "items_dropped" in found.reasons
    rest = assess(Observations(np.delete(data.outcomes, [3, 7], 0), np.delete(data.positions, [3, 7], 0), 2), 8, **FAST)
    assert found.p_values == rest.p_values


@pytest.mark.parametrize("stride", [8, None])
@pytest.mark.parametrize("items", [0, 1])
def test_too_few_items(items: int, stride: int | None) -> None:
    data = constant(1.0, 3)
    data.outcomes[items:, 0] = np.nan
    found = assess(data, stride, **FAST)
    assert found.verdict == "inconclusive"
    assert "too_few_items" in found.reasons
    assert found.accuracy == 1.0
    assert found.scan == []


def test_no_answer_at_all() -> None:
    found = assess(constant(np.nan, 3), 8, **FAST)
    assert found.reasons[0] == "too_few_items"
    assert found.accuracy_by_phase == [None] * 8
    assert found.accuracy_interval == (0.0, 1.0)


def test_windows_that_are_too_short(sim) -> None:
    data = sim.draw(np.random.default_rng(10), 20, 6)
    known = assess(data, 8, **FAST)
    assert known.reasons[0] == "window_shorter_than_stride"
    assert known.axis_tokens == 8
    assert assess(data, None, **FAST).axis_tokens == 6
    single = sim.draw(np.random.default_rng(10), 20, 1)
    assert "no_period_testable" in assess(single, None, **FAST).reasons


def test_every_number_is_finite_and_seeds_repeat(sim) -> None:
    data = sim.draw(np.random.default_rng(11), 20, 24)
    scores = np.where(data.outcomes > 0, -0.2, -3.0)
    scores[0, 0] = -np.inf
    for stride in (8, None):
        found = assess(data, stride, log_probabilities=scores, **FAST)
        assert found == assess(data, stride, log_probabilities=scores, **FAST)

        def check(value: object) -> None:
            if isinstance(value, dict):
                for entry in value.values():
                    check(entry)
            elif isinstance(value, list | tuple):
                for entry in value:
                    check(entry)
            elif isinstance(value, float):
                assert np.isfinite(value)
            assert not isinstance(value, np.generic)

        check(asdict(found))
        assert all(-3.0 < value < -0.2 for value in found.log_probability_by_phase)


def test_log_probabilities_as_outcomes(sim) -> None:
    data = sim.draw(np.random.default_rng(12), 60, 24)
    scores = -0.5 + 0.3 * np.cos(2 * np.pi * data.positions / 8) + 0.1 * np.random.default_rng(0).normal(size=(60, 24))
    found = assess(replace(data, outcomes=scores), 8, **FAST)
    assert found.verdict == "sensitive"
    assert found.amplitude == pytest.approx(0.3, abs=0.02)


def test_bad_arguments(sim) -> None:
    data = sim.draw(np.random.default_rng(13), 4, 8)
    with pytest.raises(ValueError, match="stride"):
        assess(data, 1)
    with pytest.raises(ValueError, match="margin"):
        assess(data, 4, margin=0)
    with pytest.raises(ValueError, match="log_probabilities"):
        assess(data, 4, log_probabilities=np.zeros((2, 2)), **FAST)


def test_a_hundred_items_take_less_than_three_seconds(sim) -> None:
    data = sim.draw(np.random.default_rng(14), 100, 24, sim.weak_residue(8, 7, 0.4))
    start = time.process_time()
    assess(data, None)
    assert time.process_time() - start < 3
