from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from isophase.statistics import dominant_period, period_of_counts, spectrum, summarise_counts

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "periodic_weak_spots.json").read_text())
MODELS = PUBLISHED["needle_128k"]["models"]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_published_figures(model: dict) -> None:
    found = summarise_counts(model["correct"], model["prompts_per_residue"])
    published = model["published"]
    for name in ("mean", "worst", "best", "gap"):
        assert getattr(found, name) == pytest.approx(published[name], abs=0.01)
    assert found.period_tokens == model["stride"]
    assert found.worst_phase == int(np.argmin(model["correct"]))
    expected = proportion_confint(model["correct"][3], model["prompts_per_residue"], method="wilson")
    assert (found.lower[3], found.upper[3]) == pytest.approx([100 * bound for bound in expected])
    assert found.gap_interval[0] < found.gap < found.gap_interval[1]
    assert found.mean_interval[0] < found.mean < found.mean_interval[1]


def test_fp8_series_has_period_four() -> None:
    series = PUBLISHED["fp8_completion"]["p_8"]
    assert dominant_period(series) == 4
    lines = spectrum(series)
    assert lines.periods[lines.power.argmax()] == 4
    assert lines.power.sum() == pytest.approx(1)


@pytest.mark.parametrize("protocol", ["prefix", "in_sequence"])
def test_pretraining_series_has_the_stride_although_period_two_is_the_largest_line(protocol: str) -> None:
    run = next(r for r in PUBLISHED["controlled_pretraining"]["runs"] if r["name"] == "W8/S8, 1 KV, seed 42")
    assert dominant_period(run[f"accuracy_by_residue_mod_24_{protocol}_padding"]) == 8


def test_a_trend_is_no_period() -> None:
    steps = np.arange(24)
    assert dominant_period(3 + 0.5 * steps) is None
    assert dominant_period(np.ones(8)) is None
    assert dominant_period(0.1 * steps + (steps % 4 == 3)) == 4
    assert spectrum(2.0 * steps).power.sum() == 0
    rng = np.random.default_rng(0)
    named = [dominant_period(rng.normal(size=24)) for _ in range(200)]
    assert sum(period is not None for period in named) <= 14


def test_flat_counts_have_no_period_and_a_large_table_forgives_a_trend() -> None:
    rng = np.random.default_rng(1)
    flat = [period_of_counts(rng.binomial(256, 0.7, 8), 256) for _ in range(200)]
    assert sum(period is not None for period in flat) <= 20
    # Period 2 with a slight slope, 100,000 prompts a residue: the slope is significant and not the story.
    rates = np.array([0.9, 0.7] * 4) + 0.004 * np.arange(8)
    assert period_of_counts(np.round(rates * 100_000), 100_000) == 2
    assert period_of_counts([90, 90, 90, 20, 90, 90, 90, 90], 100) == 8
    assert period_of_counts([50], 100) is None


def test_bad_tables() -> None:
    with pytest.raises(ValueError, match="prompts"):
        summarise_counts([1, 2], [0, 3])
    with pytest.raises(ValueError, match="flat list"):
        summarise_counts([[1, 2]], 3)
    with pytest.raises(ValueError, match="between 0"):
        summarise_counts([4], 3)
    with pytest.raises(ValueError, match="at least 4"):
        spectrum([1.0, 2.0])
    with pytest.raises(ValueError, match="finite"):
        dominant_period([1.0, 2.0, np.nan, 1.0])
