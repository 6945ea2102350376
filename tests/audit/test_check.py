"""One's own prompt at every shift: bundled models, planted series, and targets that misbehave."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from isophase.audit.check import run_check, shifts_to_ask
from isophase.audit.series import series_period
from isophase.errors import IsophaseError
from isophase.probes.own import OwnPrompt, read_prompt
from isophase.targets.base import Answer, TargetDefaults
from isophase.targets.planted import WordTokenizer
from isophase.targets.strides import Grid

TEXT = "the of and cat red to in that dog blue it with as ? cat"


class Answering:
    """A target whose answer depends on the length of the prompt."""

    name, tokenizer, max_length_tokens, grouped, defaults = "fake", WordTokenizer(), None, False, TargetDefaults()

    def __init__(self, answer, stride=None):
        self._answer, self.grids = answer, []
        if stride:
            self.grids = [Grid(stride_tokens=stride, kind="payload", setting="s")]
        self.asked = 0

    def describe(self):
        return {}

    def answer(self, prompts):
        for prompt in prompts:
            self.asked += 1
            shift = len(prompt.ids) - len(TEXT.split())
            yield self._answer(prompt, shift, self.asked)


def right(prompt, value=-0.1):
    return Answer(status="ok", correct=True, log_probability=value, output_ids=prompt.answer_ids)


def wrong(prompt):
    other = (prompt.answer_ids[0] + 1,)
    return Answer(status="ok", correct=False, log_probability=-4.0, output_ids=other)


def own(text=TEXT, mark=""):
    return OwnPrompt(text=text, tokenizer=WordTokenizer(), mark=mark)


@pytest.mark.parametrize("stride", [8, None])
def test_a_weak_phase_is_found_with_its_period(stride):
    target = Answering(lambda p, k, n: wrong(p) if k % 8 == 5 else right(p), stride)
    result = run_check(own(), target, expected="red")
    assert result.verdict == "sensitive"
    assert result.period_tokens == 8
    assert result.changed_shifts[:3] == [5, 13, 21]
    assert result.one_stride_agrees
    assert result.repeat_agrees
    assert 5 not in result.recommended_shifts
    assert "period of 8 tokens" in result.sentence
    assert [row.shift_tokens for row in result.shifts] == list(range(24 if stride else 48))


def test_changes_without_a_period_are_not_blamed_on_one():
    changed = {3, 4, 11, 26, 27, 40}
    result = run_check(own(), Answering(lambda p, k, n: wrong(p) if k in changed else right(p)), expected="red")
    assert (result.verdict, result.period_tokens) == ("sensitive", None)
    assert "without a period" in result.sentence
    assert not changed & set(result.recommended_shifts)


def test_stable_and_never_right():
    assert run_check(own(), Answering(lambda p, k, n: right(p)), expected="red").verdict == "stable"
    never = run_check(own(), Answering(lambda p, k, n: wrong(p)), expected="red")
    assert never.verdict == "inconclusive"
    assert "at none of" in never.sentence


def test_failures_are_no_changes():
    failed = Answer(status="error", correct=False, log_probability=math.nan, detail="down")
    some = run_check(own(), Answering(lambda p, k, n: failed if k == 7 else right(p)), expected="red")
    assert (some.verdict, some.changed_shifts) == ("inconclusive", [])
    assert some.shifts[7].status == "error"
    every = run_check(own(), Answering(lambda p, k, n: failed), expected="red")
    assert every.verdict == "inconclusive"


def test_a_target_that_is_not_deterministic_is_named():
    result = run_check(own(), Answering(lambda p, k, n: wrong(p) if n > 24 else right(p), 8), expected="red")
    assert result.repeat_agrees is False
    assert any("not deterministic" in line for line in result.reasons)


def test_a_whole_stride_that_changes_the_answer_is_more_than_phase():
    result = run_check(own(), Answering(lambda p, k, n: wrong(p) if k >= 8 else right(p), 8), expected="red")
    assert result.one_stride_agrees is False
    assert any("more than the phase" in line for line in result.reasons)


def test_only_the_filler_is_added_and_only_at_the_mark():
    prompt = own(mark="dog")
    assert prompt.position_tokens == 8
    for tokens in (0, 1, 100):
        ids = prompt.shifted(tokens)
        assert ids[:8].tolist() == prompt.ids[:8].tolist()
        assert ids[8 + tokens :].tolist() == prompt.ids[8:].tolist()
        assert len(ids) == len(prompt.ids) + tokens
        assert ids.dtype == np.int32


@pytest.mark.parametrize(
    ("text", "mark", "part"),
    [
        (TEXT, "zebra", "is not in the prompt"),
        (TEXT, "cat", "is in the prompt 2 times"),
        (TEXT + " gutters", "", "does not know the word 'gutters'"),
    ],
)
def test_prompts_that_cannot_be_used(text, mark, part):
    with pytest.raises(IsophaseError, match=part):
        OwnPrompt(text=text, tokenizer=bundled_words(), mark=mark)


def bundled_words():
    from isophase.probes.pairs import WORDS

    tokenizer = WordTokenizer()
    tokenizer._words = list(WORDS)
    tokenizer._ids = {word: n for n, word in enumerate(WORDS)}
    return tokenizer


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes("Vertr\xe4ge".encode("latin-1"))
    (tmp_path / "empty").write_text(" \n")
    for name, part in (("latin", "not UTF-8"), ("empty", "is empty"), ("none", "cannot read")):
        with pytest.raises(IsophaseError, match=part):
            read_prompt(tmp_path / name)
    (tmp_path / "fine").write_text("a question:\n")
    assert read_prompt(tmp_path / "fine") == "a question:"


def test_answers_too_long_or_unknown():
    for expected, part in (("red " * 65, "65 tokens"), (" ", "is empty"), ("xqjvz", "cannot spell")):
        with pytest.raises(IsophaseError, match=part):
            own().answers(expected)


def test_shifts():
    assert shifts_to_ask(None, 4) == list(range(24))
    assert shifts_to_ask(None, 16) == list(range(48))
    assert shifts_to_ask(None, 128) == list(range(256))
    assert shifts_to_ask(None, 512) == list(range(513))
    assert shifts_to_ask(5, 128) == list(range(6))
    with pytest.raises(IsophaseError, match="--shifts is 0"):
        shifts_to_ask(0, None)


def test_series():
    wave = [math.cos(2 * math.pi * k / 7) for k in range(48)]
    found = series_period(wave, range(2, 17))
    assert (found.period_tokens, found.p_value) == (7, pytest.approx(1 / 2000))
    assert series_period([1.0] * 48, range(2, 17)) is None
    assert series_period(wave[:13], range(7, 17)) is None
    rng = np.random.default_rng(3)
    assert series_period(rng.normal(size=48) + np.arange(48), range(2, 17)).p_value > 0.01


@pytest.fixture(scope="module", params=[450, 2000])
def document(request, tmp_path_factory):
    """A document of bundled words, its answer, and how the bundled models that read so many tokens are called.

    They were trained on 128 tokens and read 512. Beyond that their rotary positions are stretched (YaRN, arXiv
    2309.00071) in a copy of the configuration, as Qwen3's are; the weights stay.
    """
    pytest.importorskip("torch")
    from isophase.models.bundled import bundled_folder
    from isophase.probes import ProbeSettings, build_probe
    from isophase.targets import open_target

    def spec(name):
        if request.param <= 512:
            return f"isophase:{name}"
        copy = tmp_path_factory.mktemp("long") / name
        shutil.copytree(bundled_folder(name), copy)
        config = json.loads((copy / "config.json").read_text())
        config["rope_parameters"] |= {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
        (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        return f"hf:{copy}"

    tokenizer = open_target("isophase:w8s8").tokenizer
    settings = ProbeSettings(
        probe="records", style="pairs", items=2, records=24, length_tokens=request.param, window_tokens=8, seed=0
    )
    prompt = build_probe(settings, tokenizer).prompt(0)
    return tokenizer.decode(prompt.ids.tolist()), tokenizer.decode(prompt.answer_ids), spec


@pytest.mark.parametrize(("name", "verdict", "period"), [("w8s8", "sensitive", 8), ("full", "stable", None)])
def test_bundled_models(document, name, verdict, period):
    from isophase.targets import open_target

    text, answer, spec = document
    target = open_target(spec(name))
    result = run_check(OwnPrompt(text=text, tokenizer=target.tokenizer), target, expected=answer)
    assert (result.verdict, result.period_tokens) == (verdict, period)
    stable = run_check(OwnPrompt(text=text, tokenizer=target.tokenizer), target, expected=None, answer_tokens=1)
    assert stable.verdict == verdict
    assert stable.answer == result.answer
