"""Needle runs: exact prompts, answers of a plain loop, resumption, report."""

from __future__ import annotations

import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from isophase.cache import compress
from isophase.cache.spec import parse_method
from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.models.compat import cache_argument
from isophase.needle.prompts import NeedleTask
from isophase.needle.report import results_table
from isophase.needle.run import run_needle, settings_for
from isophase.needle.settings import parse_lengths
from isophase.needle.store import ANSWERS, NeedleAnswer, read_answers
from isophase.needle.summary import summarise
from isophase.probes.lexicon import PROSE
from isophase.targets.huggingface import HuggingFaceTarget

CACHES = ("full", "chunkkv(budget=40, chunk_tokens=4)", "dynamic(budget=40)")


@pytest.fixture
def target(folder):
    return HuggingFaceTarget(str(folder))


@pytest.fixture
def settings(target):
    return settings_for(target, CACHES, (180, 230), 2, 4, 0, "text")


def test_only_the_phase_moves(target, settings) -> None:
    task = NeedleTask(settings, target.tokenizer, PROSE)
    text = target.tokenizer.encode("a" + " " + " ".join(PROSE.split()))
    for item in range(4):
        prompts = [task.prompt(item * 4 + column) for column in range(4)]
        first = prompts[0].position_tokens
        assert [p.position_tokens for p in prompts] == [first + c for c in range(4)]
        assert sorted(p.position_tokens % 4 for p in prompts) == [0, 1, 2, 3]
        assert len({p.answer_ids for p in prompts}) == 1
        assert {len(p.ids) for p in prompts} == {settings.lengths[item // 2]}
        rests = []
        for p in prompts:
            needle = p.ids[p.position_tokens : p.position_tokens + task.span_tokens]
            code = target.tokenizer.decode(list(p.answer_ids)).strip()
            assert re.fullmatch(r"\d{5}", code)
            assert target.tokenizer.decode(needle.tolist()) == f" The secret number of London is {code}."
            rests.append(np.delete(p.ids, slice(p.position_tokens, p.position_tokens + task.span_tokens)).tolist())
        assert all(rest == rests[0] for rest in rests)
    assert len(text) > 200


def test_depths_cover_the_prompt(target) -> None:
    settings = settings_for(target, ("full",), (400,), 10, 4, 0, "text")
    task = NeedleTask(settings, target.tokenizer, PROSE)
    places = [task.prompt(depth * 4).position_tokens for depth in range(10)]
    assert places == sorted(places)
    assert places[0] < 12
    assert places[-1] > 400 - 80


def test_answers_are_those_of_a_plain_loop(target, settings, tmp_path) -> None:
    answers = run_needle(target, settings, PROSE, tmp_path / "run")
    task = NeedleTask(settings, target.tokenizer, PROSE)
    for row in (0, 5, 15):
        prompt = task.prompt(row)
        ids = torch.from_numpy(prompt.ids).long()[None]
        for n, spec in enumerate(CACHES):
            method = parse_method(spec, target.tokenizer.decode, target.config.vocab_size)
            total, right, step = 0.0, True, ids[:, -1:]
            with torch.no_grad(), compress(target.model, method) as cache:
                target.model(ids[:, :-1], **cache_argument(cache))
                assert answers[row].stored_bytes[n] == cache.stored_bytes()
                for token in prompt.answer_ids:
                    logits = target.model(step, **cache_argument(cache)).logits[0, -1]
                    right &= int(logits.argmax()) == token
                    total += float(torch.log_softmax(logits.double(), -1)[token])
                    step = torch.tensor([[token]])
            assert answers[row].log_probability[n] == pytest.approx(total, abs=1e-3)
            assert answers[row].correct[n] == right
    assert {a.entries for a in answers.values()} == {(179, 40, 40), (229, 40, 40)}


def test_a_killed_run_resumes(target, settings, tmp_path) -> None:
    whole = run_needle(target, settings, PROSE, tmp_path / "whole")
    asked = []

    class Killed(BaseException):
        pass

    def stop(done: int, total: int, seconds: float) -> None:
        asked.append(done)
        if done == 6:
            raise Killed

    folder = tmp_path / "cut"
    with pytest.raises(Killed):
        run_needle(target, settings, PROSE, folder, stop)
    with (folder / ANSWERS).open("ab") as file:
        file.write(b'{"row": 6, "posi')  # as a kill in the middle of a write leaves it
    again = run_needle(target, settings, PROSE, folder, lambda done, total, seconds: asked.append(done))
    assert asked == list(range(1, 17))
    assert again == whole
    assert (folder / ANSWERS).read_bytes() == (tmp_path / "whole" / ANSWERS).read_bytes()
    assert len(read_answers(folder)[0]) == 16


def test_another_run_is_not_continued(target, settings, tmp_path) -> None:
    run_needle(target, settings, PROSE, tmp_path)
    with pytest.raises(IsophaseError, match=r"other settings \(seed is 0 there and 1 here\)"):
        run_needle(target, settings.model_copy(update={"seed": 1}), PROSE, tmp_path)


def test_the_summary_counts(target, settings, tmp_path) -> None:
    answers = run_needle(target, settings, PROSE, tmp_path)
    # A random model finds nothing: say that the second method finds the code at phase 2.
    told = {
        row: a.model_copy(update={"correct": (True, a.position_tokens % 4 == 2, row == 0)})
        for row, a in answers.items()
    }
    result = summarise(settings, told, 9)
    full, grid, rare = result.methods
    assert (full.overall.accuracy, full.overall.prompts) == (1.0, 16)
    assert [s.accuracy for s in grid.by_phase] == [0, 0, 1, 0]
    assert grid.by_phase[2].lower == pytest.approx(0.51, abs=0.01)
    assert [s.accuracy for s in grid.by_length] == [0.25, 0.25]
    assert rare.cells[0][0].accuracy == 0.25
    assert grid.phases is not None
    assert grid.phases.verdict == "sensitive"
    assert full.phases is not None
    assert full.phases.gap_points == 0
    part = summarise(settings, {0: told[0]}, 9)
    assert part.methods[0].phases is None
    assert part.methods[0].cells[1][1].accuracy is None


def test_lengths() -> None:
    assert parse_lengths("1000:4000:500") == tuple(range(1000, 4001, 500))
    assert parse_lengths("7,9,7") == (7, 9)
    for wrong in ("", "a", "1:2", "5:1:1", "1:5:0", "0", "1,,2", "-5", "1:99999:1"):
        with pytest.raises(IsophaseError, match="--lengths"):
            parse_lengths(wrong)


def call(monkeypatch, capsys, arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["isophase", *arguments])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return int(str(code)), out.out, out.err


def test_the_command(arguments, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, arguments("--json", "-", "--out", "run"))
    assert code == 0, err
    found = json.loads(out)
    assert [m["cache"] for m in found["methods"]] == list(CACHES)
    assert "needle.html" in err
    page = (tmp_path / "run" / "needle.html").read_text()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert page.count("<h2") == 4
    assert json.loads((tmp_path / "run" / "needle.json").read_text()) == found
    before = (tmp_path / "run" / "answers.jsonl").read_bytes()
    code, out, err = call(monkeypatch, capsys, arguments("--out", "run"))
    assert code == 0
    assert (tmp_path / "run" / "answers.jsonl").read_bytes() == before
    assert (tmp_path / "run" / "needle.html").read_text() == page


def test_the_terminal_shows_whole_names_in_80_columns(target, tmp_path) -> None:
    caches = ("full", "snapkv(budget=128, window_tokens=16, kernel_tokens=7, pooling=max)", "dynamic(budget=40)")
    lengths = tuple(range(1000, 11_000, 1000))
    settings = settings_for(target, caches, (180,), 2, 4, 0, "text").model_copy(update={"lengths": lengths})
    answers = {
        row: NeedleAnswer(
            row=row, position_tokens=row, correct=(True, row % 4 > 0, True), log_probability=(-1.0,) * 3,
            entries=(123_456, 128, 40), stored_bytes=(123_456_789, 99, 99),
        )
        for row in range(settings.prompts)
    }  # fmt: skip
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(results_table(summarise(settings, answers, 12)))
    lines = console.file.getvalue().splitlines()
    for number, name in enumerate(caches, start=1):
        assert f"{number}  {name}" in [line.rstrip() for line in lines]
    words = [line.split() for line in lines]
    assert ["cache", "entries", "KiB", "accuracy", "95", "%", "gap", "phase"] in words
    assert ["1", "123,456", "120,563", "100", "95", "to", "100", "0", "inconclusive"] in words
    assert ["cache", *(f"{n:,}" for n in lengths[:8])] in words
    assert ["cache", *(f"{n:,}" for n in lengths[8:])] in words
    assert ["2", *["75"] * 8] in words


def test_the_margin_decides(target) -> None:
    settings = settings_for(target, ("full",), (180,), 20, 4, 0, "text")
    answers = {
        row: NeedleAnswer(
            row=row, position_tokens=row, correct=(True,), log_probability=(-1.0,), entries=(9,), stored_bytes=(9,)
        )
        for row in range(settings.prompts)
    }
    verdicts = [summarise(settings, answers, 12, margin).methods[0].phases for margin in (0.02, 0.1)]
    assert [v.verdict for v in verdicts] == ["inconclusive", "none"]
    assert [v.margin for v in verdicts] == [0.02, 0.1]
    assert {v.amplitude_upper for v in verdicts} == {1 - 0.05 ** (1 / 80)}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--margin", "0"], "--margin is 0.0; it must lie between 0 and 0.5"),
        (["--cache", "h2o(budget=9)"], "cache method 'h2o' is unknown"),
        (["--cache", "chunkkv(budget=9)"], "budget 9 is below the window"),
        (["--cache", "chunkkv(budget_bytes=9)"], "less than one entry in all layers and heads"),
        (["--cache", "chunkkv(budget=((40, 20, 20),))"], "3 budgets for 2 KV heads in layer 0"),
        (["--cache", "full"], "the same cache method is named twice"),
        (["--lengths", "20"], "has no room for needle, question and 4 phases"),
        (["--lengths", "900"], "longer than the 512 that"),
        (["--lengths", "x"], "--lengths is 'x'"),
        (["--haystack", "missing.txt"], "cannot read the haystack 'missing.txt'"),
    ],
)
def test_bad_input(more, words, arguments, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(monkeypatch, capsys, arguments("--out", "run", *more))
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_models_that_cannot_be_asked(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for spec in ("planted:period=4", "hf:", "hf:x|full", "isophase:w8s8"):
        code, _, err = call(monkeypatch, capsys, ["needle", spec])
        assert code == 2
        assert "Give hf:PATH_OR_ID." in err
