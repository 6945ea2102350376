"""`sparse_prefill` on models: exact where everything is read, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from isophase.cache import SnapKV, StreamingLLM, compress
from isophase.models.compat import cache_argument
from isophase.prefill import AShape, BlockSparse, VerticalSlash, attend_reference, sparse_prefill
from isophase.prefill.attach import _sessions

ALL = VerticalSlash(columns=0, slash_tokens=10**6)  # every distance: everything
FEW = VerticalSlash(columns=8, slash_tokens=64)


def logits(model, ids, **kwargs):
    with torch.inference_mode():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("pattern", [ALL, BlockSparse(windows=10**6), AShape(local_tokens=10**6)])
def test_reading_everything_changes_nothing(make_model, random_ids, family, pattern) -> None:
    model, ids = make_model(family), random_ids(700, rows=2)
    plain = logits(model, ids)
    with sparse_prefill(model, pattern, threshold_tokens=300) as run:
        torch.testing.assert_close(logits(model, ids), plain, atol=2e-4, rtol=1e-4)
    assert [(call.layer, call.row, call.why) for call in run.calls] == [
        (0, 0, "sparse"), (0, 1, "sparse"), (1, 0, "sparse"), (1, 1, "sparse"),
    ]  # fmt: skip
    assert run.density() == pytest.approx(1.0)
    assert run.recall() == pytest.approx(1.0, abs=1e-4)


def test_what_is_left_out_is_left_out(make_model, random_ids, monkeypatch) -> None:
    """The model's attention is the plan's: executed by the reference, the logits are the same."""
    model, ids = make_model(), random_ids(900)
    with sparse_prefill(model, FEW, threshold_tokens=300) as run:
        sparse = logits(model, ids)
    assert run.density() < 0.7
    assert all(0 < h.recall < 1 for call in run.calls for h in call.heads)
    assert not torch.allclose(sparse, logits(model, ids), atol=1e-3)

    def reference(query, key, value, plan, *, scaling, out):
        return out.copy_(attend_reference(query, key, value, plan, scaling=scaling))

    monkeypatch.setattr("isophase.prefill.execution.engine.attend_blocked", reference)
    with sparse_prefill(model, FEW, threshold_tokens=300):
        torch.testing.assert_close(logits(model, ids), sparse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batch_mates_change_nothing(make_model, random_ids, side) -> None:
    model = make_model()
    lengths = (900, 640)
    ids = torch.zeros(2, 900, dtype=torch.long)
    real = torch.zeros(2, 900, dtype=torch.long)
    rows = [random_ids(n, seed=n)[0] for n in lengths]
    for n, row in enumerate(rows):
        part = slice(0, len(row)) if side == "right" else slice(900 - len(row), 900)
        ids[n, part], real[n, part] = row, 1
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with sparse_prefill(model, FEW, threshold_tokens=300) as run:
        together = logits(model, ids, attention_mask=real, position_ids=positions)
        alone = [logits(model, row[None]) for row in rows]
    assert {call.why for call in run.calls} == {"sparse"}
    for n, row in enumerate(alone):
        torch.testing.assert_close(together[n, real[n].bool()], row[0], atol=2e-4, rtol=1e-4)


def test_sliding_layers_are_read_exactly(make_model, random_ids) -> None:
    model, ids = make_model("mistral", window=150), random_ids(800)
    plain = logits(model, ids)
    with sparse_prefill(model, FEW, threshold_tokens=300) as run:
        torch.testing.assert_close(logits(model, ids), plain, atol=2e-4, rtol=1e-4)
    assert {call.why for call in run.calls} == {"sliding window, read exactly"}


def test_a_prompt_in_parts_and_decoding(make_model, random_ids) -> None:
    model, ids = make_model(), random_ids(1200)
    plain = logits(model, ids)
    with torch.inference_mode(), sparse_prefill(model, ALL, threshold_tokens=300) as run:
        cache = DynamicCache(config=model.config)
        parts = [model(ids[:, a:b], **cache_argument(cache)).logits for a, b in [(0, 500), (500, 1100), (1100, 1190)]]
        before = len(run.calls)
        parts += [model(ids[:, n : n + 1], **cache_argument(cache)).logits for n in range(1190, 1200)]
    torch.testing.assert_close(torch.cat(parts, dim=1), plain, atol=2e-4, rtol=1e-4)
    assert [call.why for call in run.calls] == ["sparse"] * 4 + ["short part of a long prompt"] * 2
    assert len(run.calls) == before, "decoding is the model's own"


def test_generate(make_model, random_ids) -> None:
    model, ids = make_model(), random_ids(600)
    with sparse_prefill(model, "auto", threshold_tokens=300, target_recall=0.9) as run:
        out = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    assert out.shape == (1, 604)
    assert len(run.calls) == 2
    assert run.recall() >= 0.9
    assert set(run.seconds()) <= {"look", "choose", "attend", "dense"}


def test_nothing_stays_behind(make_model, random_ids) -> None:
    model = make_model()
    before, ids = copy.deepcopy(model.config.to_dict()), random_ids(600)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(IndexError), sparse_prefill(model, FEW, threshold_tokens=300):
        model(ids + 10**6)
    with pytest.raises(RuntimeError, match="stop"), sparse_prefill(model, FEW, threshold_tokens=300):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == before
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert _sessions == {}


@pytest.mark.parametrize("first", ["cache", "prefill"])
@pytest.mark.parametrize("method", [SnapKV(budget=64), StreamingLLM(budget=64)])
def test_it_goes_together_with_a_compressed_cache(make_model, random_ids, first, method) -> None:
    model, ids = make_model(), random_ids(700)

    def read(cache):
        model(ids[:, :-2], **cache_argument(cache))
        steps = [model(ids[:, n : n + 1], **cache_argument(cache)).logits for n in (698, 699)]
        return torch.cat(steps, dim=1), [kept.positions_BKE for kept in cache.what_was_kept()]

    with torch.inference_mode():
        with compress(model, method) as cache:
            expected, kept = read(cache)
        if first == "cache":
            with compress(model, method) as cache, sparse_prefill(model, ALL, threshold_tokens=300) as run:
                found, kept_too = read(cache)
        else:
            with sparse_prefill(model, ALL, threshold_tokens=300) as run, compress(model, method) as cache:
                found, kept_too = read(cache)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_too, strict=True))
    assert [call.why for call in run.calls] == ["sparse"] * 2
    assert model.config._attn_implementation == "sdpa"


def test_an_error_between_cache_and_attention_leaves_nothing(make_model, random_ids, monkeypatch) -> None:
    model, ids = make_model(), random_ids(700)

    def fail(*args, **kwargs):
        raise RuntimeError("stop")

    monkeypatch.setattr("isophase.prefill.attach._attend_sparsely", fail)
    with (
        pytest.raises(RuntimeError, match="stop"),
        sparse_prefill(model, FEW, threshold_tokens=300),
        compress(model, SnapKV(budget=64)) as cache,
    ):
        model(ids, **cache_argument(cache))
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    with compress(model, SnapKV(budget=64)) as cache:
        logits(model, ids, **cache_argument(cache))
    assert model.config._attn_implementation == "sdpa"


def test_short_prompts_and_strange_masks_are_the_models_own(make_model, random_ids) -> None:
    model, ids = make_model(), random_ids(600)
    with sparse_prefill(model, FEW, threshold_tokens=601) as run:
        assert torch.equal(logits(model, ids), logits(model, ids))
    assert {call.why for call in run.calls} == {"short"}
    holes = torch.ones_like(ids)
    holes[0, 100:120] = 0
    plain = logits(model, ids, attention_mask=holes)
    with sparse_prefill(model, FEW, threshold_tokens=300) as run:
        assert torch.equal(logits(model, ids, attention_mask=holes), plain)
    assert {call.why for call in run.calls} == {"mask is neither causal nor sliding"}
    with sparse_prefill(model, FEW, threshold_tokens=300) as run:
        model(ids)  # gradients
    assert {call.why for call in run.calls} == {"gradients are wanted"}


def test_the_threshold_is_measured_once_and_kept(make_model, random_ids, tmp_path) -> None:
    model, ids = make_model(), random_ids(600)
    for _ in range(2):
        with sparse_prefill(model) as run:
            logits(model, ids)
        file = tmp_path / "cache" / "isophase" / "prefill.json"
        written = file.read_bytes()
        assert run.threshold_tokens >= 256
    assert file.read_bytes() == written
    file.write_text("{ not json")
    from isophase.prefill.choose.machine import _costs

    _costs.cache_clear()
    with sparse_prefill(model) as run:
        logits(model, ids)
    assert run.threshold_tokens >= 256


def test_refusals(make_model) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="attention 'eager' cannot be read sparsely"):
        sparse_prefill(make_model(attention="eager")).__enter__()
    with (
        sparse_prefill(model),
        pytest.raises(ValueError, match="is read sparsely already"),
        sparse_prefill(model),
    ):
        pass
    with pytest.raises(ValueError, match="patterns for 3 layers; the model has 2"):
        sparse_prefill(model, [[FEW]] * 3).__enter__()
    with pytest.raises(ValueError, match="patterns for 4 heads; the model has 6"):
        sparse_prefill(model, [[FEW] * 4] * 2).__enter__()
    with pytest.raises(ValueError, match=r"target_recall is 1\.5"):
        sparse_prefill(model, target_recall=1.5).__enter__()
    assert model.config._attn_implementation == "sdpa"
