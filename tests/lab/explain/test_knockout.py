from __future__ import annotations

import numpy as np
import pytest
import torch

from isophase.lab.explain.knockout import knock_out, lost_shares, mean_outputs, replaced, units_of
from isophase.lab.explain.outcomes import Questions, ask


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(scope="module")
def w8s8(bundled):
    return bundled()


def test_units_are_layers_kv_heads_and_query_heads(deepseek, planted):
    kinds = [(unit.kind, unit.index) for unit in units_of(planted(4))]
    assert kinds == [("layer", None), ("kv_head", 0), ("kv_head", 1)]
    kinds = [(unit.heads.layer, unit.kind, unit.index) for unit in units_of(deepseek())]
    assert kinds[:5] == [(0, "layer", None), *((0, "query_head", n) for n in range(4))]
    assert len(kinds) == 10


def test_a_heads_own_output_changes_nothing(w8s8):
    model, questions, _ = w8s8
    ids = questions.ids[:8]
    for unit in units_of(model):
        own = []
        handle = unit.heads.projection.register_forward_pre_hook(lambda _m, i, own=own: own.append(i[0][:, -1:]))
        with torch.no_grad():
            before = model(ids, use_cache=False).logits
            handle.remove()
            with replaced(unit, own[0]):
                after = model(ids, use_cache=False).logits
        assert torch.equal(before, after)


def test_mean_replacement_equals_a_recomputation_by_hand(w8s8):
    model, questions, _ = w8s8
    units = [u for u in units_of(model) if u.heads.layer == 1]
    layer = model.model.layers[1]
    means, _ = mean_outputs(model, questions, units)
    seen = {}
    handles = [
        layer.register_forward_pre_hook(lambda _m, i: seen.update(residual=i[0][:, -1])),
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, i: seen.update(heads=i[0][:, -1])),
    ]
    with torch.no_grad():
        model(questions.ids, use_cache=False)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(means[1][0].float(), seen["heads"].mean(dim=0), atol=1e-5, rtol=1e-5)
        for unit in units:
            heads = seen["heads"].clone()
            heads[:, unit.channels] = seen["heads"].mean(dim=0)[unit.channels]
            hidden = seen["residual"] + layer.self_attn.o_proj(heads)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            by_hand = model.lm_head(model.model.norm(hidden))
            with replaced(unit, means[1]):
                logits = model(questions.ids, use_cache=False).logits[:, -1]
            torch.testing.assert_close(logits, by_hand, atol=1e-4, rtol=1e-4)
            assert not torch.allclose(logits, model(questions.ids, use_cache=False).logits[:, -1])


def test_earlier_positions_stay_as_they_are(w8s8):
    model, questions, _ = w8s8
    units = units_of(model)
    means, _ = mean_outputs(model, questions, units)
    with torch.no_grad(), replaced(units[0], means[0]):
        after = model(questions.ids[:4], use_cache=False).logits
    with torch.no_grad():
        before = model(questions.ids[:4], use_cache=False).logits
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_nothing_is_left_behind_after_a_fault(any_model):
    model = any_model
    unit = units_of(model)[0]
    before = hooks(model)
    with pytest.raises(KeyboardInterrupt), replaced(unit, torch.zeros(1, unit.channels.stop)):
        raise KeyboardInterrupt
    assert hooks(model) == before
    broken = Questions(
        ids=torch.full((2, 9), 10**6), answers=torch.zeros(2, 1).long(), positions=np.array([[0, 1]]), span_tokens=2
    )
    with pytest.raises(IndexError):
        mean_outputs(model, broken, [unit])
    assert hooks(model) == before


def test_deepseek_heads_are_cut_at_the_right_channels(deepseek):
    model = deepseek()
    unit = next(u for u in units_of(model) if u.kind == "query_head" and u.index == 2)
    seen = []
    with replaced(unit, torch.full((1, 32), 7.0)):
        handle = unit.heads.projection.register_forward_pre_hook(lambda _m, i: seen.append(i[0]))
        with torch.no_grad():
            model(torch.arange(2, 22)[None], use_cache=False)
        handle.remove()
    last = seen[0][0, -1].reshape(4, 8)  # o_groups of two heads each
    assert bool((last[2] == 7).all())
    assert not bool((last[[0, 1, 3]] == 7).any())


def test_a_planted_head_is_found_selective(planted):
    items, stride, vocabulary = 12, 4, 16
    phase = np.tile(np.arange(stride), items)
    answers = np.repeat(np.arange(items), stride)
    ids = np.stack([answers, phase == stride - 1, *[np.zeros(items * stride)] * 3], axis=1).astype(np.int64)
    questions = Questions(
        ids=torch.from_numpy(ids),
        answers=torch.from_numpy(answers)[:, None],
        positions=phase.reshape(items, stride) + 8,
        span_tokens=2,
    )
    model = planted(vocabulary)
    units = units_of(model)
    means, outcomes = mean_outputs(model, questions, units)
    before = outcomes.lap_means(stride)
    assert before.mean() == 1
    lost = {}
    for unit in units:
        lost[unit.name] = lost_shares(before, knock_out(model, questions, unit, means).lap_means(stride))
    # Means are alike for all items, so the first answer of a tie is still found: chance, 1 in 12.
    first, second = lost["layer 0, KV head 0"], lost["layer 0, KV head 1"]
    assert first.share[:3].min() > 0.8
    assert first.share[3] == 0
    assert second.share[3] > 0.8
    assert second.share[:3].max() == 0
    assert first.surely_selective
    assert second.surely_selective
    assert not lost["layer 0"].selective


def test_lost_shares_need_accuracy_to_lose():
    before = np.tile([1.0, 0.05], (20, 1))
    lost = lost_shares(before, before * 0.2)
    assert lost.share[0] == pytest.approx(0.8)
    assert np.isnan(lost.share[1])
    assert lost.low[0] == pytest.approx(0.8)


def test_asking_does_not_depend_on_the_batch(w8s8):
    model, questions, _ = w8s8
    assert (ask(model, questions).outcomes == ask(model, questions, batch_tokens=500).outcomes).all()
