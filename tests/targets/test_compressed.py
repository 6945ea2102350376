"""A model that answers from a compressed cache."""

from __future__ import annotations

import pytest
import torch

from isophase.cache import compress
from isophase.errors import IsophaseError
from isophase.models.compat import cache_argument
from isophase.probes import ProbeSettings, build_probe
from isophase.targets import open_target
from isophase.targets.compressed import CompressedTarget
from isophase.targets.huggingface import HuggingFaceTarget


def prompts_of(target, **changes):
    settings = {
        "probe": "records", "items": 2, "records": 4, "length_tokens": 130, "window_tokens": 6, "seed": 3,
        "style": "sentences", "value_tokens": 2, **changes,
    }  # fmt: skip
    return list(build_probe(ProbeSettings(**settings), target.tokenizer))


@pytest.mark.parametrize("cache", ["chunkkv(budget=24, window_tokens=8)", "dynamic(budget=24, window_tokens=8)"])
def test_answers_are_those_of_a_plain_loop(cache, folder) -> None:
    target = open_target(f"hf:{folder('llama')}|{cache}")
    assert isinstance(target, CompressedTarget)
    prompts = prompts_of(target)
    answers = list(target.answer(prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.from_numpy(prompt.ids).long()[None]
        total = 0.0
        with torch.no_grad(), compress(target.model, target.method) as state:
            target.model(ids[:, :-1], **cache_argument(state))
            step = ids[:, -1:]
            for token in prompt.answer_ids:
                logits = target.model(step, **cache_argument(state)).logits[0, -1]
                total += float(torch.log_softmax(logits.double(), -1)[token])
                step = torch.tensor([[token]])
        assert answer.log_probability == pytest.approx(total, abs=1e-3)
    assert target.describe()["cache"] == cache
    assert target.describe()["prefix_shared"] is False


def test_the_full_method_is_the_plain_target(folder) -> None:
    path = str(folder("llama"))
    plain, full = HuggingFaceTarget(path), CompressedTarget(path, cache="full")
    prompts = prompts_of(plain)
    for a, b in zip(plain.answer(prompts), full.answer(prompts), strict=True):
        assert a.log_probability == pytest.approx(b.log_probability, abs=1e-3)
    assert plain.fingerprint() != full.fingerprint()


def test_the_grid_is_the_chunk(folder) -> None:
    path = folder("llama")
    assert [g.stride_tokens for g in open_target(f"hf:{path}|chunkkv(budget=64, chunk_tokens=7)").grids] == [7]
    assert open_target(f"hf:{path}|dynamic(budget=64)").grids == []


def test_what_cannot_be_compressed(folder) -> None:
    with pytest.raises(IsophaseError, match="cache method 'h2o' is unknown"):
        open_target(f"hf:{folder('llama')}|h2o(budget=64)")
    target = open_target(f"hf:{folder('deepseek_v4')}|chunkkv(budget=64)")
    with pytest.raises(IsophaseError, match="compression works for models"):
        list(target.answer(prompts_of(target)))
