from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys

import pytest

from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.lab.explain.page import render_explanation, render_json
from isophase.lab.explain.run import explain
from isophase.lab.explain.schema import Explanation
from isophase.models.bundled import bundled_folder

ITEMS = 4


@pytest.fixture(scope="module")
def w8s8() -> Explanation:
    return explain("isophase:w8s8", items=ITEMS)


def test_w8s8_is_explained(w8s8):
    assert (w8s8.stride_tokens, w8s8.window_tokens, w8s8.boundary_phases) == (8, 8, [7])
    assert w8s8.baseline.by_phase.index(min(w8s8.baseline.by_phase)) == 7
    layer = next(k for k in w8s8.knockouts if k.name == "layer 1")
    assert layer.is_kv_head
    assert layer.selective
    assert layer.lost_share_by_phase[7] > 0.5
    assert [c.parameters for c in w8s8.cycling] == ["gates", "gates and payloads"]
    for cycling in w8s8.cycling:
        assert cycling.complete
        assert [shift.delta_tokens for shift in cycling.shifts] == [-3, -2, -1, 1, 2, 3]
        assert cycling.staying.by_phase.index(min(cycling.staying.by_phase)) == 7
    assert [c.cause for c in w8s8.causes] == ["slot", "straddle", "anchor", "visibility"]
    uniform = next(i for i in w8s8.causes[0].interventions if "uniform" in i.name)
    assert uniform.effect == "cannot tell"


def test_json_round_trip(w8s8):
    text = render_json(w8s8)
    assert Explanation.model_validate_json(text) == w8s8
    assert json.loads(text)["schema_version"] == 1


def test_the_page_is_self_contained(w8s8):
    page = render_explanation(w8s8)
    assert page == render_explanation(Explanation.model_validate_json(render_json(w8s8)))
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert "prefers-color-scheme: dark" in page
    for sentence in w8s8.summary[:2]:
        assert sentence in page


def test_foreign_names_are_escaped(w8s8):
    page = render_explanation(w8s8.model_copy(update={"model": "<b>\x1b[1m"}))
    assert "<b>" not in page
    assert "\x1b" not in page


def test_deepseek_is_explained_and_left_alone_and_bytes_repeat(deepseek_folder):
    first = explain(str(deepseek_folder), items=2, probe="in-sequence")
    assert first.model_type == "deepseek_v4"
    assert first.stride_tokens == 4
    assert [g.branch for g in first.gates] == ["keys and values", "indexer", "keys and values"]
    assert [c.parameters for c in first.cycling] == ["gates"]
    assert [c.cause for c in first.causes] == ["slot", "straddle", "anchor", "visibility"]
    assert any("stride 8" in note for note in first.notes)
    again = explain(str(deepseek_folder), items=2, probe="in-sequence")
    assert render_json(first) == render_json(again)
    assert render_explanation(first) == render_explanation(again)


def test_a_model_without_compressor_has_no_causes():
    found = explain("isophase:full", items=2, stride_tokens=4)
    assert found.stride_tokens is None
    assert found.axis_tokens == 4
    assert not found.gates
    assert {i.effect for c in found.causes for i in c.interventions} == {"not applicable"}
    assert not any(k.selective for k in found.knockouts)
    assert "no gap" in found.summary[0]
    assert "<h1" in render_explanation(found)


def test_checkpoints_are_read_as_training(tmp_path):
    for step, name in ((2, "w4s4"), (10, "w4s4")):
        shutil.copytree(bundled_folder(name), tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()
    found = explain(str(tmp_path), items=2)
    assert found.model.endswith("step-10")
    assert [step.step for step in found.training] == [2, 10]
    assert found.training[0].gates == found.gates
    assert "Concentration through training" in render_explanation(found)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("isophase:w8s8", {"probe": "completion"}, "completion"),
        ("isophase:nothing", {}, "no bundled model"),
        ("planted:period=8", {}, "no parts"),
        ("/nowhere", {}, "does not exist"),
        ("isophase:w8s8", {"stride_tokens": 5}, "stride 8"),
        ("isophase:w8s8", {"items": 1}, "--items"),
    ],
)
def test_bad_input_is_one_line(model, options, words):
    with pytest.raises(IsophaseError, match=words):
        explain(model, **options)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["isophase", "explain", "isophase:full", "--items", "2", "--out", str(tmp_path), "--json", "-"]
    )
    with contextlib.suppress(SystemExit):
        main()
    out, err = capsys.readouterr()
    found = Explanation.model_validate_json(out)
    assert out == (tmp_path / "explain.json").read_text()
    assert (tmp_path / "explain.html").read_text() == render_explanation(found)
    assert found.summary[0] in err.replace("\n", " ")
