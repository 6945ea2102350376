from __future__ import annotations

import json
import math

import pytest

from isophase.audit import words
from isophase.audit.analyse import build_report
from isophase.audit.report import render_json, write_report
from isophase.audit.schema import Report
from isophase.errors import IsophaseError
from isophase.targets.base import Answer
from isophase.targets.planted import PlantedTarget


@pytest.fixture
def report_of(run, settings, tokenizer_of):
    def build(target, **changes):
        _, folder = run(settings(target, **changes))
        return build_report(folder, tokenizer_of)

    return build


@pytest.mark.parametrize(
    ("target", "stride", "window", "period"),
    [
        ("planted:period=8,amplitude=.2,accuracy=.7", "scan", 24, 8),
        ("planted:period=4,amplitude=.2,accuracy=.7,trend=.3,noise=.1", "scan", 24, 4),
        ("planted:period=8,amplitude=.2,accuracy=.7", "auto", 24, 8),
        ("planted:period=16,amplitude=.3,accuracy=.7,shape=square", "auto", 16, 16),
    ],
)
def test_planted_effect_is_found(report_of, target, stride, window, period):
    report = report_of(target, stride=stride, window_tokens=window, items=32)
    assert (report.verdict, report.period_tokens, report.axis_tokens) == ("sensitive", period, period)
    assert report.scan_period_tokens == period
    assert f"repeats every {period} tokens" in report.sentence
    assert report.gap_interval_points[0] > 0
    planted = PlantedTarget.from_spec(target).amplitude
    assert report.amplitude_debiased < 1.5 * planted
    assert report.amplitude_upper > planted * 0.7
    assert len(report.accuracy_by_phase) == len(report.interval_by_phase) == period
    assert sum(report.prompts_by_phase) == report.prompts == 32 * window


def test_worst_phase_is_the_planted_one(report_of):
    report = report_of("planted:period=8,amplitude=.3,accuracy=.6,shape=single", items=48, window_tokens=8)
    assert report.worst_phase == 7
    assert report.weak_phases == [7]
    assert "(the chunk boundary)" in report.sentence


@pytest.mark.parametrize("seed", range(4))
def test_nothing_planted_is_never_sensitive(report_of, seed):
    report = report_of("planted:amplitude=0,accuracy=.8,trend=.2,noise=.1", items=24, window_tokens=24, seed=seed)
    assert report.verdict in ("none", "inconclusive")
    assert report.period_tokens is None


def test_nothing_planted_and_enough_asked_is_none(report_of):
    report = report_of("planted:amplitude=0,accuracy=.97", items=64, window_tokens=24, stride=8, margin=0.1)
    assert report.verdict == "none"
    assert "upper limit" in report.reasons[0]


def test_errors_are_not_misses(report_of):
    report = report_of("planted:amplitude=0,accuracy=1,errors=.02", items=32)
    assert report.accuracy == 1
    assert report.statuses["error"] > 0
    assert sum(report.statuses.values()) == 256
    assert report.dropped_items > 0
    assert report.items + report.dropped_items == 32
    assert report.prompts == 8 * report.items
    assert any("left out because an answer is missing" in reason for reason in report.reasons)


def test_only_errors(report_of):
    report = report_of("planted:amplitude=0,accuracy=1,errors=1")
    assert report.verdict == "inconclusive"
    assert report.statuses == {"error": 64}
    assert report.prompts == 0
    json.loads(render_json(report), parse_constant=lambda name: pytest.fail(name))


def test_all_wrong_is_inconclusive_and_says_why(report_of):
    report = report_of("planted:amplitude=0,accuracy=0")
    assert report.verdict == "inconclusive"
    assert "the model answered nothing right" in " ".join(report.reasons)
    assert "fewer --records" in report.advice[0]
    assert report.accuracy == 0


class Sloppy(PlantedTarget):
    """Every second miss is not even an answer."""

    def answer(self, prompts):
        for prompt, answer in zip(prompts, super().answer(prompts), strict=True):
            if answer.correct or prompt.column % 2:
                yield answer
            else:
                yield Answer(status="wrong_format", correct=False, log_probability=answer.log_probability)


def test_wrong_format_is_a_miss_counted_apart(run, settings, tokenizer_of):
    reports = []
    for name, kind in (("neat", PlantedTarget), ("sloppy", Sloppy)):
        _, folder = run(settings(), name, lambda spec, kind=kind: kind())
        reports.append(build_report(folder, tokenizer_of))
    neat, sloppy = reports
    assert sloppy.accuracy == neat.accuracy
    assert sloppy.accuracy_by_phase == neat.accuracy_by_phase
    assert neat.statuses == {"ok": 64}
    assert sloppy.statuses["wrong_format"] > 0
    assert sum(sloppy.statuses.values()) == 64


def test_report_is_a_pure_function_of_the_folder(run, settings, tokenizer_of):
    _, folder = run(settings(control="planted:amplitude=0", probes=("records", "prefix")))
    page = write_report(build_report(folder, tokenizer_of), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    page.unlink()
    (folder / "report.json").unlink()
    write_report(build_report(folder, tokenizer_of), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    report = Report.model_validate_json(before["report.json"])
    assert [(f.role, f.probe) for f in report.findings] == [
        ("target", "records"),
        ("control", "records"),
        ("target", "prefix"),
        ("control", "prefix"),
    ]
    assert report.control == report.findings[1]
    lead = report.findings[0]
    assert all(getattr(report, name) == value for name, value in lead)


def test_incomplete_run(run, settings, tokenizer_of):
    _, folder = run(settings())
    (folder / "manifest.json").unlink()
    with pytest.raises(IsophaseError, match=r"not complete: 64 of 64 prompts .*Repeat the `isophase audit`"):
        build_report(folder, tokenizer_of)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("answers.jsonl", "", "64 of 64 answers are missing from a complete run"),
        ("manifest.json", "{}", "manifest.json is damaged: it does not say how long"),
        ("manifest.json", "[]", "not a JSON object"),
        ("manifest.json", "{", "manifest.json is damaged"),
    ],
)
def test_damaged_run(run, settings, tokenizer_of, name, text, message):
    _, folder = run(settings())
    (folder / name).write_text(text)
    with pytest.raises(IsophaseError, match=message):
        build_report(folder, tokenizer_of)


def test_advice_names_a_control_only_where_none_took_part(report_of):
    alone = report_of("planted:amplitude=.3,accuracy=.65", items=24)
    assert any("--control" in line for line in alone.advice)


def test_advice_with_a_control(report_of):
    report = report_of("planted:amplitude=.3,accuracy=.65", items=24, control="planted:amplitude=0")
    assert report.verdict == "sensitive"
    assert not any("--control" in line for line in report.advice)


def test_advice_on_more_items_would_decide(report_of):
    report = report_of("planted:amplitude=0,accuracy=.8", items=8)
    assert report.verdict == "inconclusive"
    (line,) = report.advice
    more = report.more_prompts_to_decide
    assert line == f"About {more:,} more prompts would decide: --items {math.ceil((64 + more) / 8)}."


def test_limits_name_length_pilot_and_probe(run, settings):
    plan, _ = run(settings())
    (part,) = plan.parts
    assert words.limits(plan) == ["Prompts have 256 tokens; effects can be larger in longer contexts."]
    piloted = part.model_copy(update={"pilot_accuracy": {"128": 0.25, "64": 0.75}})
    selector = part.model_copy(update={"grids": ("x: stride 4 (selector only, exact tokens are still read)",)})
    completion = part.model_copy(update={"probe": part.probe.model_copy(update={"probe": "completion"})})
    notes = words.limits(plan.model_copy(update={"parts": (piloted, selector, completion)}))
    assert "A pilot chose the number of records (accuracy by records: 128: 25%, 64: 75%)." in notes
    assert any("wrong selection, not lost information" in note for note in notes)
    assert any("read its strip as a demonstration" in note for note in notes)


class Speller:
    """One token per character: it can write the completion probe."""

    prefix_ids = ()

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Coder(PlantedTarget):
    tokenizer = Speller()


def test_completion_probe_end_to_end(run, settings):
    target = Coder(period=8, amplitude=0.3, accuracy=0.5)
    plan, folder = run(settings("a", probes=("completion",), stride="scan"), opener=lambda spec: target)
    assert plan.rows == 64
    report = build_report(folder, lambda spec: Speller())
    strip = report.completion
    assert (len(strip.families), len(strip.filler_tokens)) == (4, 16)
    assert strip.rankings == 64
    assert strip.rankings_right == round(report.accuracy * 64)
    assert len(strip.p_right) == len(strip.p_wrong) == 4
    assert all(0 < p < 1 for row in strip.p_right for p in row)
    assert report.period_tokens == 8
    assert report.length_tokens > 500
    assert any("read its strip as a demonstration" in note for note in report.notes)
    assert not any("--items" in line for line in report.advice)


def test_undecided_completion_probe_points_to_one_that_can_decide(run, settings):
    target = Coder(amplitude=0, accuracy=0.5)
    _, folder = run(settings("a", probes=("completion",)), opener=lambda spec: target)
    report = build_report(folder, lambda spec: Speller())
    assert report.verdict == "inconclusive"
    assert "--probe records" in report.advice[0]
