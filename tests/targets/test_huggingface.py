"""Answers of real transformers models: shared prefixes and batches give what a plain loop gives."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from isophase.probes import ProbeSettings, Prompt, build_probe
from isophase.targets.huggingface import HuggingFaceTarget, pick_dtype

ARCHITECTURES = ["llama", "qwen2", "gpt_neox", "gpt2", "deepseek_v4", "compressed_qwen3"]


def real_prompts(target: HuggingFaceTarget, probe: str = "records", **changes: Any) -> list[Prompt]:
    settings = {
        "probe": probe,
        "items": 2,
        "records": 4,
        "length_tokens": 130,
        "window_tokens": 6,
        "seed": 3,
        "style": "sentences",
        **changes,
    }
    return list(build_probe(ProbeSettings(**settings), target.tokenizer))


def make_some_right(model: Any, prompts: list[Prompt]) -> list[Prompt]:
    """Give every other prompt the answer that the model itself would write, so that some are right."""
    out = []
    with torch.inference_mode():
        for n, prompt in enumerate(prompts):
            ids = prompt.ids.tolist()
            for _ in prompt.answer_ids:
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            written = tuple(ids[len(prompt.ids) :])
            valid = prompt.valid_first_ids | {written[0]}
            out.append(replace(prompt, answer_ids=written, valid_first_ids=valid) if n % 2 else prompt)
    return out


def assert_like_the_loop(target: HuggingFaceTarget, prompts: list[Prompt], loop: Any) -> None:
    answers = list(target.answer(prompts))
    assert len(answers) == len(prompts)
    for prompt, answer, (log_p, picked) in zip(prompts, answers, loop(target.model, prompts), strict=True):
        right = picked == list(prompt.answer_ids)
        assert answer.correct == right
        assert answer.log_probability == pytest.approx(log_p, abs=1e-4)
        first_wrong = next((i for i, (p, a) in enumerate(zip(picked, prompt.answer_ids, strict=True)) if p != a), None)
        assert answer.output_ids == tuple(picked[: None if right else first_wrong + 1])
        formed = right or picked[0] in prompt.valid_first_ids or not prompt.valid_first_ids
        assert answer.status == ("ok" if formed else "wrong_format")


@pytest.mark.parametrize("probe", ["records", "prefix"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_a_plain_loop(folder, plain_loop, architecture, probe) -> None:
    target = HuggingFaceTarget(str(folder(architecture)), device="cpu")
    prompts = make_some_right(target.model, real_prompts(target, probe))
    assert_like_the_loop(target, prompts, plain_loop)
    assert any(a.correct for a in target.answer(prompts))
    assert not all(a.correct for a in target.answer(prompts))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefixes_are_shared_where_the_cache_can(folder, architecture) -> None:
    target = HuggingFaceTarget(str(folder(architecture)), device="cpu")
    assert target.describe()["prefix_shared"] is None
    list(target.answer(real_prompts(target)))
    # In transformers 5.17, DeepSeek V4's cache leaves its compressor's state behind when rows are reordered.
    able = architecture != "deepseek_v4" or "reorder_cache" in vars(DeepseekV4HCACache)
    assert target.describe()["prefix_shared"] is able


def test_an_item_takes_two_forward_passes(folder) -> None:
    """One for the common prefix, one for all that follows it."""
    target = HuggingFaceTarget(str(folder("compressed_qwen3")), device="cpu")
    prompts = real_prompts(target, items=4)
    list(target.answer(prompts[:6]))
    shapes: list[tuple[int, ...]] = []
    target.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    list(target.answer(prompts[6:]))
    assert len(shapes) == 2 * 3
    for (one, shared), (rows, rest) in zip(shapes[::2], shapes[1::2], strict=True):
        assert (one, rows, shared + rest) == (1, 6, 130)
        assert shared >= 47


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "deepseek_v4", "compressed_qwen3"])
@pytest.mark.parametrize("batch_tokens", [1, 130, 300, 530])
def test_batches_smaller_than_an_item(folder, plain_loop, architecture, batch_tokens) -> None:
    target = HuggingFaceTarget(str(folder(architecture)), device="cpu", batch_tokens=batch_tokens)
    prompts = make_some_right(target.model, real_prompts(target, window_tokens=5))
    rows = []
    target.model.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    list(target.answer(prompts))
    assert max(rows) <= max(2, batch_tokens // 130)  # two: the trial of the shared prefix
    assert_like_the_loop(target, prompts, plain_loop)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v4", "compressed_qwen3"])
def test_answers_and_choices_of_several_tokens(folder, plain_loop, architecture) -> None:
    target = HuggingFaceTarget(str(folder(architecture)), device="cpu", batch_tokens=400)
    prompts = make_some_right(target.model, real_prompts(target, value_tokens=3, key_tokens=2))
    choices = ((7, 9, 400), (300,), (12, 13))
    prompts = [replace(p, choices=choices) for p in prompts]
    assert {len(p.answer_ids) for p in prompts} == {3}
    assert_like_the_loop(target, prompts, plain_loop)
    answers = list(target.answer(prompts))
    for number, choice in enumerate(choices):
        asked = [replace(p, answer_ids=choice) for p in prompts]
        for answer, (log_p, _) in zip(answers, plain_loop(target.model, asked), strict=True):
            assert answer.choice_log_probabilities[number] == pytest.approx(log_p, abs=1e-4)


def test_choices_may_differ_between_neighbours(folder, plain_loop) -> None:
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    sets = [((5,),), ((5, 6),), (), ((8, 9), (4,)), ((9, 8), (3,)), ((2,), (3,))]
    prompts = [replace(p, choices=c) for p, c in zip(real_prompts(target, items=1), sets, strict=True)]
    for prompt, answer in zip(prompts, target.answer(prompts), strict=True):
        asked = [replace(prompt, answer_ids=c) for c in prompt.choices]
        expected = [log_p for log_p, _ in plain_loop(target.model, asked)]
        assert answer.choice_log_probabilities == pytest.approx(expected, abs=1e-4)


def test_answers_come_in_the_order_of_the_prompts(folder, plain_loop) -> None:
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    prompts = real_prompts(target) + real_prompts(target, length_tokens=147, value_tokens=2)
    prompts = make_some_right(target.model, [prompts[k] for k in np.random.default_rng(0).permutation(len(prompts))])
    assert_like_the_loop(target, prompts, plain_loop)
    assert list(target.answer([])) == []


def test_one_item_and_one_prompt_alone(folder, plain_loop) -> None:
    target = HuggingFaceTarget(str(folder("compressed_qwen3")), device="cpu")
    prompts = real_prompts(target)
    for prompt in prompts[:2]:
        assert_like_the_loop(target, [prompt], plain_loop)
    assert target.describe()["prefix_shared"] is None  # nothing to try it on yet
    assert_like_the_loop(target, [prompts[0]] * 3, plain_loop)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batches_are_never_padded(folder, architecture) -> None:
    target = HuggingFaceTarget(str(folder(architecture)), device="cpu", batch_tokens=400)
    prompts = real_prompts(target) + real_prompts(target, length_tokens=137)
    calls: list[tuple[torch.Tensor, dict[str, Any]]] = []
    target.model.register_forward_pre_hook(lambda _, args, kw: calls.append((args[0], kw)), with_kwargs=True)
    list(target.answer(prompts))
    asked = {tuple(p.ids.tolist()) for p in prompts}
    prefixes = {ids[:n] for ids in asked for n in range(len(ids))}
    suffixes = {ids[n:] for ids in asked for n in range(len(ids))}
    assert calls
    for ids, settings in calls:
        assert settings.get("attention_mask") is None
        assert settings.get("position_ids") is None
        for row in map(tuple, ids.tolist()):
            # Whole prompts, a beginning of one, or the end of one: no other token is ever read.
            assert row in asked or row in prefixes or row in suffixes


def test_a_wrong_format_is_told_from_a_wrong_answer(folder) -> None:
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    prompt = real_prompts(target)[0]
    written = next(iter(target.answer([prompt]))).output_ids[0]
    other = (written + 1) % 100
    cases = [
        (replace(prompt, answer_ids=(other,), valid_first_ids=frozenset({other})), "wrong_format", False),
        (replace(prompt, answer_ids=(other,), valid_first_ids=frozenset({other, written})), "ok", False),
        (replace(prompt, answer_ids=(other,), valid_first_ids=frozenset()), "ok", False),
        (replace(prompt, answer_ids=(written,), valid_first_ids=frozenset({other})), "ok", True),
    ]
    for changed, status, correct in cases:
        answer = next(iter(target.answer([changed])))
        assert (answer.status, answer.correct, answer.output_ids) == (status, correct, (written,))


@pytest.mark.parametrize("fault", [NotImplementedError, AttributeError, "wrong keys", "nothing"])
def test_a_cache_that_cannot_be_shared_is_not(folder, plain_loop, monkeypatch, fault) -> None:
    def reorder(layer: Any, rows: torch.Tensor) -> None:
        if isinstance(fault, type):
            raise fault("rows cannot be reordered")
        if fault == "wrong keys":
            layer.keys = layer.keys.flip(-2).index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)

    monkeypatch.setattr(DynamicLayer, "reorder_cache", reorder)
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    assert_like_the_loop(target, make_some_right(target.model, real_prompts(target)), plain_loop)
    assert target.describe()["prefix_shared"] is False


def test_sharing_is_tried_before_it_is_used(folder, plain_loop, monkeypatch) -> None:
    """A first group without a common prefix decides nothing."""

    def reorder(layer: Any, rows: torch.Tensor) -> None:
        layer.keys = torch.zeros_like(layer.keys).index_select(0, rows)
        layer.values = layer.values.index_select(0, rows)

    monkeypatch.setattr(DynamicLayer, "reorder_cache", reorder)
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    prompts = make_some_right(target.model, real_prompts(target))
    unlike = [replace(p, item=99, ids=np.roll(p.ids, n)) for n, p in enumerate(prompts[:3])]
    assert_like_the_loop(target, prompts[:1] + unlike + prompts[1:], plain_loop)


def test_what_is_not_finite_is_an_error(folder) -> None:
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    prompts = real_prompts(target, items=1)
    poison = 2
    assert all(poison not in p.ids for p in prompts)
    ids = prompts[2].ids.copy()
    ids[-3] = poison
    prompts[2] = replace(prompts[2], ids=ids)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[poison] = float("nan")
    answers = list(target.answer(prompts))
    assert [a.status == "error" for a in answers] == [n == 2 for n in range(len(prompts))]
    assert not answers[2].correct
    assert math.isnan(answers[2].log_probability)
    assert "non-finite" in answers[2].detail


def test_a_prompt_that_fails_does_not_take_the_others_along(folder, plain_loop) -> None:
    target = HuggingFaceTarget(str(folder("gpt2")), device="cpu")
    prompts = real_prompts(target, items=1)
    ids = prompts[1].ids.copy()
    ids[-1] = 1_000_000  # no such token
    broken = [prompts[0], replace(prompts[1], ids=ids), *prompts[2:]]
    answers = list(target.answer(broken))
    assert answers[1].status == "error"
    assert answers[1].detail.startswith("IndexError: ")
    assert math.isnan(answers[1].log_probability)
    for answer, (log_p, _) in zip(answers[2:], plain_loop(target.model, prompts[2:]), strict=True):
        assert answer.log_probability == pytest.approx(log_p, abs=1e-4)
    longer = [replace(p, ids=np.resize(p.ids, 600)) for p in prompts]  # beyond the learned positions
    assert {a.status for a in target.answer(longer)} == {"error"}


def test_running_out_of_memory_is_an_error_of_its_batch_alone(folder, plain_loop) -> None:
    target = HuggingFaceTarget(str(folder("llama")), device="cpu")
    prompts = make_some_right(target.model, real_prompts(target))

    def narrow(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[0] > 1:
            raise torch.OutOfMemoryError("no memory for more than one row")

    hook = target.model.register_forward_pre_hook(narrow)
    answers = list(target.answer(prompts))
    hook.remove()
    assert {a.status for a in answers} <= {"ok", "wrong_format"}
    for answer, (log_p, _) in zip(answers, plain_loop(target.model, prompts), strict=True):
        assert answer.log_probability == pytest.approx(log_p, abs=1e-4)


def test_what_it_says_about_itself(folder, bpe_tokenizer) -> None:
    path = folder("compressed_qwen3")
    target = HuggingFaceTarget(str(path), device="cpu")
    assert target.name == f"hf:{path}"
    assert target.grouped
    assert target.max_length_tokens == 512
    assert [g.stride_tokens for g in target.grids] == [4]
    described = target.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["model_type"] == "compressed_qwen3"
    assert (described["device"], described["dtype"]) == ("cpu", "float32")
    assert target._model is None  # none of this needs the weights
    assert HuggingFaceTarget(str(path), name="mine", device="cpu").name == "mine"


def test_the_tokenizer_neither_adds_nor_hides_tokens(folder, bpe_tokenizer) -> None:
    tokenizer = HuggingFaceTarget(str(folder("llama")), device="cpu").tokenizer
    assert tokenizer.prefix_ids == (0,)
    text = " The code for amber is  river .\n"
    ids = tokenizer.encode(text)
    assert 0 not in ids
    assert tokenizer.decode(np.array([0, *ids])) == "<s>" + text


def test_the_fingerprint_follows_configuration_and_weights(folder, tmp_path) -> None:
    source = HuggingFaceTarget(str(folder("llama")), device="cpu")
    fingerprint = source.fingerprint()
    assert HuggingFaceTarget(str(folder("llama")), device="cpu").fingerprint() == fingerprint
    model = source.model
    for file in folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    copied = HuggingFaceTarget(str(tmp_path), device="cpu").fingerprint()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path)  # the same names and sizes, other weights
    assert HuggingFaceTarget(str(tmp_path), device="cpu").fingerprint() != copied


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({}, torch.float32), ({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16)],
)
def test_dtype_by_device(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    config = transformers.LlamaConfig(dtype="bfloat16")
    assert pick_dtype(config, torch.device("cpu")) == dtype
    assert pick_dtype(transformers.LlamaConfig(), torch.device("cpu")) == torch.float32
