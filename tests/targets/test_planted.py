from __future__ import annotations

import math
import random

import numpy as np
import pytest

from isophase.errors import IsophaseError
from isophase.probes import ProbeSettings, build_probe
from isophase.targets.base import Target
from isophase.targets.planted import PlantedTarget


def prompts_for(target, items=100, window_tokens=8, **changes):
    fields = {"probe": "records", "records": 6, "length_tokens": 200, "seed": 0, **changes}
    settings = ProbeSettings(items=items, window_tokens=window_tokens, **fields)
    return list(build_probe(settings, target.tokenizer))


def accuracy_by_residue(target, prompts, period):
    hits = np.array([answer.correct for answer in target.answer(prompts)])
    residues = np.array([p.position_tokens % period for p in prompts])
    return np.array([hits[residues == r].mean() for r in range(period)])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("cosine", 0.7 + 0.3 * np.cos(2 * np.pi * np.arange(8) / 8)),
        ("single", [1, 1, 1, 1, 1, 1, 1, 0.4]),
        ("square", [1, 1, 1, 1, 0.4, 0.4, 0.4, 0.4]),
    ],
)
def test_planted_effect_shows(shape, expected):
    target: Target = PlantedTarget(shape=shape, accuracy=0.7, amplitude=0.3)
    prompts = prompts_for(target, items=400)
    assert accuracy_by_residue(target, prompts, 8) == pytest.approx(np.array(expected), abs=0.08)
    assert [target.probability(p) for p in prompts[:8]] == pytest.approx(
        [expected[p.position_tokens % 8] for p in prompts[:8]]
    )


def test_nothing_planted_gives_nothing():
    target = PlantedTarget(amplitude=0)
    assert accuracy_by_residue(target, prompts_for(target, items=400), 8) == pytest.approx(0.8, abs=0.07)
    assert target.grids == []
    assert PlantedTarget().grids[0].stride_tokens == 8


def test_answers_are_deterministic_and_independent_of_order():
    target = PlantedTarget(errors=0.1, item_noise=0.1, seed=3)
    prompts = prompts_for(target, items=20)
    answers = list(target.answer(prompts))
    order = list(range(len(prompts)))
    random.Random(0).shuffle(order)
    shuffled = dict(zip(order, target.answer([prompts[k] for k in order]), strict=True))
    assert [repr(shuffled[k]) for k in range(len(prompts))] == [repr(a) for a in answers]
    other = PlantedTarget(errors=0.1, item_noise=0.1, seed=4)
    assert [repr(a) for a in other.answer(prompts)] != [repr(a) for a in answers]


def test_errors_are_errors_and_not_misses():
    target = PlantedTarget(accuracy=1, amplitude=0, errors=0.2)
    answers = list(target.answer(prompts_for(target)))
    failed = [a for a in answers if a.status == "error"]
    assert 0.15 < len(failed) / len(answers) < 0.25
    assert all(math.isnan(a.log_probability) and a.detail and not a.output_ids for a in failed)
    assert all(a.correct for a in answers if a.status == "ok")


def test_outputs_agree_with_the_judgement():
    target = PlantedTarget(accuracy=0.5)
    prompts = prompts_for(target, items=10, value_tokens=2, records=4)
    for prompt, answer in zip(prompts, target.answer(prompts), strict=True):
        assert (answer.output_ids == prompt.answer_ids) == answer.correct
        assert answer.output_ids[0] in prompt.valid_first_ids
        assert answer.log_probability == pytest.approx(math.log(target.probability(prompt)))


def test_trend_and_noise():
    target = PlantedTarget(accuracy=0.5, amplitude=0, trend=2)
    early, late = min_max(prompts_for(target, length_tokens=500), key=lambda p: p.position_tokens)
    depth = (late.position_tokens - early.position_tokens) / 1000
    assert target.probability(late) - target.probability(early) == pytest.approx(2 * depth)

    noisy = PlantedTarget(accuracy=0.5, amplitude=0, item_noise=0.1)
    chances = np.array([noisy.probability(p) for p in prompts_for(noisy, items=500)]).reshape(500, 8)
    assert chances.std() == pytest.approx(0.1, abs=0.01)
    assert np.abs(np.diff(chances, axis=1)).max() < 0.2  # smooth along the window
    assert abs(chances.mean() - 0.5) < 0.02


def min_max(values, key):
    return min(values, key=key), max(values, key=key)


def test_spec_round_trips():
    assert PlantedTarget.from_spec("planted:") == PlantedTarget()
    target = PlantedTarget.from_spec("planted:period=4, amplitude=.2,shape=single,noise=.05,accuracy=.7,seed=9")
    expected = PlantedTarget(period=4, amplitude=0.2, shape="single", item_noise=0.05, accuracy=0.7, seed=9)
    assert target == expected
    assert PlantedTarget.from_spec(target.name) == target
    assert target.describe()["period"] == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("planted:colour=red", r"cannot read 'colour=red'.*keys from: period"),
        ("planted:period", "cannot read 'period'"),
        ("planted:period=4.5", "period=4.5 is not a whole number"),
        ("planted:amplitude=much", "amplitude=much is not a number"),
        ("planted:amplitude=nan", "amplitude=nan is out of range"),
        ("planted:period=1", "period=1 is out of range.*from 2"),
        ("planted:errors=2", "errors=2.0 is out of range"),
        ("planted:noise=-1", "noise=-1.0 is out of range"),
        ("planted:shape=round", "shape=round is unknown.*cosine, single, square"),
        ("planted:accuracy=.95", r"leaves the range 0 to 1. Use amplitude=0\.05 or less"),
        ("planted:seed=1,seed=2", "seed is given twice"),
    ],
)
def test_bad_specs_say_what_to_do(spec, message):
    with pytest.raises(IsophaseError, match=message):
        PlantedTarget.from_spec(spec)


def test_tokenizer_knows_the_words():
    tokenizer = PlantedTarget().tokenizer
    assert tokenizer.encode("? the cat red pavement") == [2, 3, 67, 131, 0]
    assert tokenizer.decode([2, 67]) == "? cat"
