from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from isophase.audit.compare import compare_runs
from isophase.errors import IsophaseError
from isophase.targets import open_target
from isophase.targets.planted import PlantedTarget

EFFECT, NULL = "planted:period=8,amplitude=.25,accuracy=.7", "planted:amplitude=0,accuracy=.7,seed=6"


def compared(first, second):
    return compare_runs(first, second, lambda gguf: cache(open_target))


@pytest.fixture
def folder(run, settings):
    return lambda name, target, **changes: run(settings(target, items=32, **changes), name)[1]


def test_compressed_against_dense(folder):
    found = compared(folder("a", EFFECT), folder("b", NULL))
    assert (found.first, found.second) == (EFFECT, NULL)
    assert found.axis_tokens == 8
    assert found.items == 32
    assert found.gap_difference_points > 10
    assert found.gap_interval_points[0] > 0
    assert found.p_values["omnibus"] < 0.01
    assert "planted:amplitude=0,accuracy=.7,seed=6 differ in how" in found.sentence
    assert len(found.difference_by_phase_points) == 8
    assert len(found.rows()) == 4
    back = compared(folder("c", NULL, stride=8), folder("d", EFFECT))
    assert back.gap_difference_points == pytest.approx(-found.gap_difference_points)
    assert back.accuracy_difference_points == pytest.approx(-found.accuracy_difference_points)


def test_identical_runs_differ_by_exactly_nothing(folder):
    first, second = folder("a", EFFECT), folder("b", EFFECT)
    for found in (compared(first, second), compared(first, first)):
        assert found.accuracy_difference_points == found.gap_difference_points == 0
        assert found.accuracy_interval_points == found.gap_interval_points == (0, 0)
        assert set(found.difference_by_phase_points) == {0}
        assert found.p_values == {"harmonic": 1, "omnibus": 1}
        assert "do not differ detectably" in found.sentence


def test_which_parts_are_compared(folder):
    first, again = folder("a", EFFECT, control=NULL), folder("b", EFFECT, control=NULL)
    found = compared(first, first)  # one run: its target against its control
    assert (found.first, found.second) == (EFFECT, NULL)
    found = compared(first, again)  # two runs: target against target
    assert (found.first, found.second) == (EFFECT, EFFECT)


@pytest.mark.parametrize("change", [{"seed": 1}, {"records": 5}, {"length_tokens": 300}, {"probes": ("prefix",)}])
def test_different_items_are_refused(folder, change):
    with pytest.raises(IsophaseError, match=r"asked the same prompts .*same options and --seed"):
        compared(folder("a", EFFECT), folder("b", NULL, **change))


class Renamed(PlantedTarget):
    @property
    def tokenizer(self):
        tokenizer = type(super().tokenizer)()
        tokenizer._words = tokenizer._words[:3] + tokenizer._words[:2:-1]
        tokenizer._ids = {word: number for number, word in enumerate(tokenizer._words)}
        return tokenizer


def test_equal_positions_with_another_tokenizer_are_other_prompts(run, settings):
    _, first = run(settings(EFFECT), "a")
    _, second = run(settings("planted:seed=9"), "b", lambda spec: Renamed(seed=9))

    def opener(spec):
        return Renamed() if "seed=9" in spec else open_target(spec)

    with pytest.raises(IsophaseError, match="tokenizers differ"):
        compare_runs(first, second, lambda gguf: opener)


def test_too_few_complete_items(run, settings):
    _, first = run(settings("planted:amplitude=0,errors=1"), "a")
    _, second = run(settings("planted:amplitude=0"), "b")
    with pytest.raises(IsophaseError, match="0 items are complete in both runs; two are needed"):
        compared(first, second)


def test_incomplete_run(folder):
    first, second = folder("a", EFFECT), folder("b", NULL)
    (second / "manifest.json").unlink()
    with pytest.raises(IsophaseError, match=r"'.*b' is not complete"):
        compared(first, second)
    with pytest.raises(IsophaseError, match="not a run folder"):
        compared(first, Path("/nonexistent"))
