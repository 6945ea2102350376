"""Size and power of the verdict, by simulation: `pytest -m slow tests/statistics`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isophase.statistics import DEFAULT_PERIODS, assess, prompts_needed

pytestmark = pytest.mark.slow

FAST = {"shifts": 999, "resamples": 200}
NULLS = 400
TRIALS = 400


@pytest.mark.parametrize(("stride", "items", "window"), [(4, 60, 24), (8, 60, 24), (16, 40, 32), (128, 15, 128)])
def test_false_alarms(sim, stride: int, items: int, window: int) -> None:
    """Depth trend, unlike items, a smooth curve per item: none of it is a period."""
    rng = np.random.default_rng(stride)
    sensitive = rejected = scanned = covered = 0
    raw = np.zeros(3)
    for seed in range(NULLS):
        data = sim.draw(rng, items, window, spread=0.8, trend=1.5, wobble=0.5)
        found = assess(data, stride, seed=seed, **FAST)
        sensitive += found.verdict == "sensitive"
        rejected += min(found.p_values_adjusted.values()) < 0.05
        raw += np.array(list(found.p_values.values())) < 0.05
        scanned += found.scan_period_tokens is not None
        covered += found.gap_interval_points[0] <= 0 <= found.gap_interval_points[1]
    print(
        f"null m={stride}: sensitive {sensitive / NULLS:.3f}, Holm {rejected / NULLS:.3f}, raw "
        f"{(raw / NULLS).round(3)}, scan {scanned / NULLS:.3f}, gap interval holds 0 {covered / NULLS:.3f}"
    )
    assert sensitive / NULLS <= 0.07
    assert rejected / NULLS <= 0.07
    assert (raw / NULLS <= 0.085).all()  # single tests at 5 %: three standard errors
    assert scanned / NULLS <= 0.085
    assert covered / NULLS >= 0.92


@pytest.mark.parametrize("amplitude", [0.05, 0.10])
@pytest.mark.parametrize(("period", "window"), [(4, 24), (8, 24), (16, 32)])
@pytest.mark.parametrize("known", [True, False], ids=["known", "scan"])
def test_planned_prompts_find_a_sinusoid(sim, known: bool, period: int, window: int, amplitude: float) -> None:
    tests = 3 if known else sum(p <= window for p in DEFAULT_PERIODS)
    items = math.ceil(prompts_needed(0.16, amplitude, tests=tests, window_tokens=window) / window)
    rng = np.random.default_rng(period)
    found = named = 0
    for seed in range(TRIALS):
        pattern = sim.sinusoid(period, amplitude, rng.uniform(0, 2 * np.pi))
        result = assess(sim.draw(rng, items, window, pattern), period if known else None, seed=seed, **FAST)
        found += result.verdict == "sensitive"
        named += result.verdict == "sensitive" and result.period_tokens == period
    print(
        f"sinusoid {amplitude} period {period} {'known' if known else 'scan'}: {items} items, "
        f"found {found / TRIALS:.3f}, named {named / TRIALS:.3f}"
    )
    # The plan aims at 0.90 found; naming may cost up to two points more. Seeds are fixed, so this cannot flicker.
    assert found / TRIALS >= 0.88
    assert named / TRIALS >= 0.88


def test_the_published_plan_has_its_power(sim) -> None:
    """One test, one lap: 1,620 prompts find 0.05 nine times in ten."""
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(TRIALS):
        data = sim.draw(rng, math.ceil(1620 / 8), 8, sim.sinusoid(8, 0.05))
        hits += assess(data, 8, seed=seed, **FAST).p_values["harmonic"] < 0.05
    print(f"published plan: {hits / TRIALS:.3f}")
    assert 0.84 <= hits / TRIALS <= 0.97


@pytest.mark.parametrize("period", [4, 8, 16])
def test_one_weak_residue_is_named_by_the_scan(sim, period: int) -> None:
    rng = np.random.default_rng(period)
    named = sensitive = 0
    for seed in range(TRIALS):
        data = sim.draw(rng, 60, 48, sim.weak_residue(period, period - 1, 0.35), spread=0.5, trend=1.0, wobble=0.3)
        result = assess(data, None, seed=seed, **FAST)
        sensitive += result.verdict == "sensitive"
        named += result.period_tokens == period
    print(f"one weak residue mod {period}: sensitive {sensitive / TRIALS:.3f}, named {named / TRIALS:.3f}")
    assert named / TRIALS >= 0.9
    assert sensitive / TRIALS >= 0.95
