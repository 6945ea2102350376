from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isophase.lab.explain.anatomy import average, by_offset, changed, gate_branches, hooked, roll
from isophase.lab.explain.cycling import (
    fit,
    kept_phases,
    measure_rolls,
    pooled,
    predict,
    roll_all,
    rolls_of,
    shown_shifts,
    slot_parameters,
)
from isophase.lab.explain.gates import deepseek_weights, effective_slots, watch_gates
from isophase.lab.explain.outcomes import Questions, ask


@pytest.fixture
def w8s8(bundled):
    return bundled()


def random_questions() -> Questions:
    ids = torch.randint(2, 195, (8, 41), generator=torch.Generator().manual_seed(1))
    return Questions(ids=ids, answers=ids[:, :1], positions=np.arange(8, 16).reshape(1, 8), span_tokens=2)


def test_branches_of_both_kinds(bundled, deepseek):
    model, _, _ = bundled()
    assert [(b.layer, b.name, len(b.gates), len(b.payloads)) for b in gate_branches(model)] == [
        (0, "keys", 2, 1),
        (0, "values", 2, 1),
        (1, "keys", 2, 1),
        (1, "values", 2, 1),
    ]
    assert gate_branches(bundled("full")[0]) == []
    found = [(b.layer, b.name, b.window_tokens, b.stride_tokens) for b in gate_branches(deepseek())]
    assert found == [(0, "keys and values", 8, 4), (0, "indexer", 8, 4), (1, "keys and values", 8, 8)]


def test_effective_slots():
    weights = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]], dtype=torch.double)
    torch.testing.assert_close(effective_slots(weights, 1), torch.tensor([1.0, 4, 2], dtype=torch.double))


def test_uniform_gates_have_concentration_w(w8s8):
    model, questions, _ = w8s8
    parameters = slot_parameters(gate_branches(model), payloads=False)
    with changed(parameters, torch.zeros_like):
        for use in watch_gates(model, questions, 8):
            assert use.static_slots == pytest.approx(8)
            assert use.per_window_slots == pytest.approx(8)
            assert use.profile == pytest.approx([1 / 8] * 8)


def test_profiles_are_weights(any_model):
    uses = watch_gates(any_model, random_questions(), 8)
    assert uses
    for use in uses:
        assert math.fsum(use.profile) == pytest.approx(1)
        assert 1 <= use.per_window_slots <= use.static_slots + 1e-9 <= len(use.profile) + 1e-8


def test_deepseek_weights_equal_the_definition(deepseek):
    compressor = gate_branches(deepseek())[0].module
    width, stride = compressor.head_dim, 4
    gates = torch.randn(2, 14, 2 * width, generator=torch.Generator().manual_seed(0))
    weights = deepseek_weights(compressor, gates)
    assert weights.shape == (2, 2, 8, width)
    bias = compressor.position_bias.detach()
    for entry in (1, 2):
        logits = torch.empty(2, 8, width)
        for slot in range(stride):
            previous, current = (entry - 1) * stride + slot, entry * stride + slot
            logits[:, slot] = gates[:, previous, :width] + bias[slot, :width]
            logits[:, stride + slot] = gates[:, current, width:] + bias[slot, width:]
        torch.testing.assert_close(weights[:, entry - 1], logits.softmax(dim=1))


def test_rolling_by_the_stride_is_the_identity(w8s8):
    model, questions, _ = w8s8
    parameters = slot_parameters(gate_branches(model), payloads=True)
    with torch.no_grad():
        before = model(questions.ids[:4], use_cache=False).logits
        with changed(parameters, roll(8, 8)):
            assert torch.equal(model(questions.ids[:4], use_cache=False).logits, before)
        with changed(parameters, roll(3, 8)):
            assert not torch.equal(model(questions.ids[:4], use_cache=False).logits, before)


def test_rolling_everything_equals_rolling_the_tokens_of_a_window(w8s8):
    model, _, _ = w8s8
    branch = gate_branches(model)[0].module
    windows = torch.randn(1, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    filled = torch.ones(1, 3, 8, dtype=torch.bool)
    parameters = slot_parameters(gate_branches(model)[:1], payloads=True)
    with torch.no_grad(), changed(parameters, roll(3, 8)):
        rolled = branch(windows, filled)
    with torch.no_grad():
        torch.testing.assert_close(rolled, branch(torch.roll(windows, -3, dims=2), filled))


def test_overlapping_windows_roll_within_stride_blocks():
    slots = torch.arange(8.0)
    assert by_offset(slots, 4).shape == (2, 4)
    assert by_offset(slots, 6).shape == (1, 8)
    assert roll(1, 4)(slots).tolist() == [3, 0, 1, 2, 7, 4, 5, 6]
    assert average(4)(slots).tolist() == [1.5] * 4 + [5.5] * 4


def test_parameters_are_restored_after_a_fault(w8s8):
    model, _, _ = w8s8
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = slot_parameters(gate_branches(model), payloads=True)
    with pytest.raises(RuntimeError), changed(parameters, roll(2, 8)):
        raise RuntimeError
    with pytest.raises(RuntimeError), changed(parameters, lambda p: p[:3]):
        pass
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hooks_are_removed_when_registering_fails():
    layer = torch.nn.Linear(2, 2)

    def refuse():
        raise RuntimeError

    with pytest.raises(RuntimeError), hooked([lambda: layer.register_forward_pre_hook(print), refuse]):
        pass
    assert not layer._forward_pre_hooks


def test_rolls_separate_what_moves_from_what_stays():
    rng = np.random.default_rng(0)
    moves, stays = rng.random(8) / 2, rng.random(8) / 2
    table = measure_rolls(lambda delta: (np.roll(moves, delta) + stays)[None], rolls_of(8))
    assert table.complete
    np.testing.assert_allclose(table.moving()[0], moves + stays.mean())
    np.testing.assert_allclose(table.staying()[0], stays + moves.mean())


def test_a_planted_slot_effect_is_predicted_and_a_fixed_one_is_not():
    rng = np.random.default_rng(1)
    original = np.tile(rng.random(8), (6, 1)) + 0.01 * rng.random((6, 8))
    shifts = shown_shifts(8)
    assert shifts == [-3, -2, -1, 1, 2, 3]
    moved = np.stack([np.roll(original, shift, axis=1) for shift in shifts])
    whole, bounds = pooled(original, moved, shifts)
    assert whole.r_squared == pytest.approx(1)
    assert bounds == pytest.approx((1, 1))
    fixed, _ = pooled(original, np.stack([original] * 6), shifts)
    assert fixed.r_squared < 0.5


def test_fit_and_left_out_phases():
    assert shown_shifts(4) == [-1, 1, 2]
    assert shown_shifts(2) == [1]
    assert kept_phases([7], 2, 8, image=False) == [0, 1, 2, 3, 4, 5, 6]
    assert kept_phases([7], 2, 8, image=True) == [0, 2, 3, 4, 5, 6]
    assert predict(np.array([1.0, 2, 3]), 1).tolist() == [3, 1, 2]
    observed = np.array([0.1, 0.5, 0.9])
    assert fit(observed, observed).r_squared == 1
    assert fit(np.full(3, 0.5), observed).r_squared == pytest.approx(0)
    assert fit(1 - observed, observed).correlation_squared == pytest.approx(1)
    assert fit(np.ones(3), np.ones(3)).r_squared is None


def test_cycling_leaves_the_model_as_it_was(deepseek):
    model = deepseek()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    questions = random_questions()
    branches = [b for b in gate_branches(model) if b.stride_tokens == 4]
    table = roll_all(model, questions, branches, 4, payloads=False)
    assert table.shifts == (0, 1, 2, 3)
    np.testing.assert_array_equal(table.accuracy[0], ask(model, questions).lap_means(4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
