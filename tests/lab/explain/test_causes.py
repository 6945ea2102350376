from __future__ import annotations

import numpy as np
import pytest
import torch

from isophase.lab.explain import causes
from isophase.lab.explain.anatomy import gate_branches, hooked
from isophase.lab.explain.curves import curve_of, intervention
from isophase.lab.explain.cycling import measure_rolls, rolls_of
from isophase.lab.explain.outcomes import Questions
from isophase.probes import ProbeSettings

SETTINGS = ProbeSettings(
    probe="records", items=4, records=24, length_tokens=114, window_tokens=8, seed=0, style="pairs"
)


def subject_of(model, questions, tokenizer, stride: int, boundary=(7,), baseline=None) -> causes.Subject:
    return causes.Subject(
        model=model,
        questions=questions,
        settings=SETTINGS,
        tokenizer=tokenizer,
        branches=[b for b in gate_branches(model) if b.stride_tokens == stride],
        stride_tokens=stride,
        boundary=boundary,
        baseline=np.full((4, stride), 0.9) if baseline is None else baseline,
        laps=1,
    )


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_default_anchors_change_nothing_and_others_do(any_model):
    ids = torch.randint(2, 195, (4, 41), generator=torch.Generator().manual_seed(1))
    questions = Questions(ids=ids, answers=ids[:, :1], positions=np.arange(8, 12).reshape(1, 4), span_tokens=2)
    stride = gate_branches(any_model)[0].stride_tokens
    subject = subject_of(any_model, questions, None, stride)
    before = logits(any_model, ids)
    anchors = causes.default_anchors(subject)
    batch = [anchors]
    with hooked(causes._anchor_hooks(subject, batch)):
        torch.testing.assert_close(logits(any_model, ids), before)
        batch[0] = anchors + 3
        assert not torch.allclose(logits(any_model, ids), before, atol=1e-4)
    torch.testing.assert_close(logits(any_model, ids), before)


def test_own_anchors_move_only_entries_that_hold_the_record(bundled):
    model, _, _ = bundled()
    ids = torch.zeros(2, 32, dtype=torch.long)
    questions = Questions(ids=ids, answers=ids[:, :1], positions=np.array([[15, 16]]), span_tokens=2)
    anchors = causes.own_anchors(subject_of(model, questions, None, 8))
    assert anchors.tolist() == [[0, 15, 16, 24], [0, 8, 16, 24]]


def test_own_anchors_of_overlapping_windows(deepseek):
    ids = torch.zeros(1, 24, dtype=torch.long)
    questions = Questions(ids=ids, answers=ids[:, :1], positions=np.array([[9]]), span_tokens=2)
    anchors = causes.own_anchors(subject_of(deepseek(), questions, None, 4))
    # Entries 2 and 3 read tokens 4..11 and 8..15.
    assert anchors.tolist() == [[0, 4, 9, 9, 16, 20]]


def test_the_question_moves_and_the_record_does_not(bundled):
    _, questions, _ = bundled()
    filler = np.full((4, 3), 7)
    longer = questions.with_tokens(110, filler)
    assert longer.ids.shape[1] == questions.ids.shape[1] + 3
    assert torch.equal(longer.ids[:, :110], questions.ids[:, :110])
    assert bool((longer.ids[:, 110:113] == 7).all())
    assert torch.equal(longer.ids[:, 113:], questions.ids[:, 110:])
    with pytest.raises(AssertionError):
        questions.with_tokens(5, filler)


def test_visibility_inserts_before_the_question(bundled):
    model, questions, tokenizer = bundled()
    movable, question_tokens, probe = causes._movable(subject_of(model, questions, tokenizer, 8))
    assert probe.settings.length_tokens in (107, 114)
    assert movable.ids.shape[1] == probe.settings.length_tokens
    key = movable.ids[0, movable.positions[0, 0]]
    assert key in movable.ids[0, -question_tokens:]


def test_effects_are_named():
    rng = np.random.default_rng(0)
    low = np.tile([0.9, 0.9, 0.9, 0.2], (40, 1)) + 0.01 * rng.random((40, 4))
    level = np.full((40, 4), 0.9) + 0.01 * rng.random((40, 4))
    half = np.tile([0.9, 0.9, 0.9, 0.6], (40, 1)) + 0.01 * rng.random((40, 4))
    broken = np.full((40, 4), 0.02)
    for before, after, effect in (
        (low, level, "removes"),
        (low, half, "reduces"),
        (low, low, "no change"),
        (half, low, "enlarges"),
        (level, level, "nothing to remove"),
        (low, broken, "cannot tell"),
    ):
        assert intervention("x", before, after, 1, {}).effect == effect


def test_curves_hold_their_means():
    curve = curve_of(np.array([[1.0, 0.0], [1.0, 1.0]]), 3)
    assert curve.by_phase == [1.0, 0.5]
    assert curve.accuracy == 0.75
    for value, (low, high) in zip(curve.by_phase, curve.interval_by_phase, strict=True):
        assert low <= value <= high


def test_a_planted_straddle_stays_and_a_planted_slot_moves(bundled):
    model, questions, tokenizer = bundled()
    rng = np.random.default_rng(0)

    def table(moves: np.ndarray, stays: np.ndarray):
        noise = rng.random((4, 8)) / 100
        return measure_rolls(lambda delta: np.roll(moves, delta)[None] + stays[None] + noise, rolls_of(8))

    weak, level = np.array([0.45] * 7 + [0.0]), np.full(8, 0.45)
    straddle, slot = table(level, weak), table(weak, level)
    for rolls, moving, staying in ((straddle, 0, 45), (slot, 45, 0)):
        assert curve_of(rolls.moving(), 1).gap_points == pytest.approx(moving, abs=3)
        assert curve_of(rolls.staying(), 1).gap_points == pytest.approx(staying, abs=3)
    subject = subject_of(model, questions, tokenizer, 8, baseline=straddle.accuracy[0])
    found = causes.straddle_cause(subject, [("gates", straddle)])
    assert [one.effect for one in found.interventions] == ["removes", "removes"]
    subject = subject_of(model, questions, tokenizer, 8, baseline=slot.accuracy[0])
    found = causes.straddle_cause(subject, [("gates", slot)])
    assert found.interventions[1].effect == "nothing to remove"


def test_records_longer_than_a_chunk_always_straddle(bundled):
    model, questions, tokenizer = bundled()
    found = causes.straddle_cause(subject_of(model, questions, tokenizer, 8, boundary=range(8)), [])
    assert found.interventions[0].effect == "not applicable"
