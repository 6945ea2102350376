"""The product's promise on the bundled models: found without being told, named rightly, control clean."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isophase.models.bundled import bundled_folder, bundled_names, memory_words, training_record


def audit(*arguments: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "isophase.cli.main", "audit", *arguments, "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 10, 11), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    code, report = audit("--out", str(tmp_path_factory.mktemp("runs") / "bundled"))
    return code, report, {finding["target"]: finding for finding in report["findings"]}


def test_exit_code_says_sensitive(bundled):
    code, report, _ = bundled
    assert code == 10
    assert report["verdict"] == "sensitive"


def test_w8s8_is_found_without_being_told(bundled):
    _, report, findings = bundled
    w8s8 = findings["isophase:w8s8"]
    assert w8s8["stride_source"] == "scan"
    assert w8s8["verdict"] == "sensitive"
    assert w8s8["period_tokens"] == 8
    assert w8s8["gap_points"] >= 40
    assert w8s8["worst_phase"] == 7
    assert w8s8["boundary_phases"] == [7]
    assert all(report[key] == value for key, value in w8s8.items())


def test_w4s4_has_period_4(bundled):
    w4s4 = bundled[2]["isophase:w4s4"]
    assert w4s4["verdict"] == "sensitive"
    assert w4s4["period_tokens"] == 4
    assert w4s4["gap_points"] > 10


@pytest.mark.parametrize("name", ["hash4", "keys8"])
def test_chunks_that_follow_the_content_have_no_weak_phase(bundled, name):
    _, _, findings = bundled
    cured, sick = findings[f"isophase:{name}"], findings["isophase:w4s4" if name == "hash4" else "isophase:w8s8"]
    assert cured["stride_source"] == "scan"
    assert cured["verdict"] == "none"
    assert cured["period_tokens"] is None
    assert cured["gap_points"] < 5
    best = max(sick["accuracy_by_phase"])
    assert min(cured["accuracy_by_phase"]) > best - 0.03


def test_full_attention_is_a_clean_and_able_control(bundled):
    _, report, findings = bundled
    full = findings["isophase:full"]
    assert full["verdict"] == "none"
    assert full["accuracy"] > 0.95
    low, high = full["gap_interval_points"]
    assert low <= 0 <= high
    assert report["control"] == full


@pytest.mark.parametrize("probe", ["prefix", "in-sequence"])
def test_the_published_sweeps_find_it_too(probe, tmp_path):
    """Records as dense as in training: harder at every phase, and still worst at the boundary."""
    code, report = audit("isophase:w8s8", "--control", "none", "--probe", probe, "--out", str(tmp_path / "run"))
    assert code == 10
    assert report["period_tokens"] == 8
    assert report["worst_phase"] == 7
    assert report["p_values_adjusted"]["boundary"] < 0.05


def test_bundled_models_are_small_and_documented():
    assert bundled_names() == ["full", "hash4", "keys8", "w4s4", "w8s8"]
    for name in bundled_names():
        record = training_record(name)
        folder = bundled_folder(name)
        assert record.weights_bytes == (folder / "model.safetensors").stat().st_size < 1_600_000
        assert memory_words(name)
        assert (folder / "curve.jsonl").read_text().count("\n") > 50
        recipe = json.loads((folder / "recipe.json").read_text())
        assert recipe["seed"] == record.seed


def test_matched_recipes_differ_only_in_compression():
    from isophase.lab.train.recipe import Recipe

    recipes = {
        name: Recipe.model_validate_json((bundled_folder(name) / "recipe.json").read_text()).model_dump()
        for name in bundled_names()
    }
    for name, recipe in recipes.items():
        differing = {key for key in recipe if recipe[key] != recipes["full"][key]}
        # The older records do not name the device; all are of a CPU.
        assert differing <= {"name", "purpose", "model", "device"}, name
        memory = ("compression_", "chunk_") + (("num_key_value_heads",) if name == "keys8" else ())
        model = {k: v for k, v in recipe["model"].items() if not k.startswith(memory)}
        assert model == {k: v for k, v in recipes["full"]["model"].items() if not k.startswith(memory)}
