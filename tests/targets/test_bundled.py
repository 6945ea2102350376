"""Bundled models as targets, on checkpoints made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.run import train
from isophase.models import bundled
from isophase.probes import ProbeSettings, build_probe
from isophase.targets import open_target


def recipe(name: str, **model: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": name,
            "seed": 1,
            "model": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                **model,
            },
            "stages": [{"context_tokens": 16, "pairs": 4, "queries": 2, "batch": 2, "steps": 2}],
            "optimiser": {"learning_rate": 0.01},
            "probe": {"records": 5, "length_tokens": 40, "items": 3},
        }
    )


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bundled, "CHECKPOINTS", tmp_path)
    for made in (recipe("full"), recipe("w4s4", compression_window=4, compression_stride=4)):
        train(made, tmp_path / made.name, command="test")
    (tmp_path / "unfinished").mkdir()
    return tmp_path


def test_a_bundled_model_answers_its_own_probe(checkpoints: Path) -> None:
    assert bundled.bundled_names() == ["full", "w4s4"]
    target = open_target("isophase:w4s4")
    assert target.name == "isophase:w4s4"
    assert [g.stride_tokens for g in target.grids] == [4]
    defaults = target.defaults
    assert (defaults.records, defaults.length_tokens, defaults.items) == (5, 40, 3)
    assert (defaults.style, defaults.control) == ("pairs", "isophase:full")
    settings = ProbeSettings(probe="records", items=2, records=5, length_tokens=40, window_tokens=8, seed=0)
    probe = build_probe(settings, target.tokenizer)
    answers = list(target.answer(list(probe)))
    assert len(answers) == 16
    assert {a.status for a in answers} <= {"ok", "wrong_format"}
    assert open_target("isophase:full").defaults.control is None
    assert open_target("isophase:full").grids == []


def test_unknown_and_unfinished_models(checkpoints: Path) -> None:
    for name in ("w16s16", "unfinished", "../full"):
        with pytest.raises(IsophaseError) as caught:
            open_target(f"isophase:{name}")
        assert "full, w4s4" in str(caught.value)
        assert repr(name) in str(caught.value)
    with pytest.raises(KeyError):
        bundled.bundled_folder("unfinished")


def test_the_record_says_how_it_was_trained(checkpoints: Path) -> None:
    record = bundled.training_record("w4s4")
    assert (record.name, record.window_tokens, record.stride_tokens, record.seed) == ("w4s4", 4, 4, 1)
    assert (record.steps, record.sequences, record.tokens) == (2, 4, 4 * (16 + 6))
    assert record.weights_bytes == (checkpoints / "w4s4" / "model.safetensors").stat().st_size
