"""Recipes: one YAML file decides a run, and matched recipes differ visibly in nothing but the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Optimiser, Recipe, read_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
BASE = """\
name: base
seed: 1
model: {hidden_size: 16, local_window: 4}
stages:
  - {context_tokens: 16, pairs: 3, queries: 2, batch: 4, steps: 3}
optimiser: {learning_rate: 0.01, warmup_steps: 2}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def refused(path: Path, *words: str, overrides: tuple[str, ...] = ()) -> None:
    with pytest.raises(IsophaseError) as caught:
        read_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_reads_a_recipe(base: Path) -> None:
    recipe = read_recipe(base)
    assert (recipe.name, recipe.seed, recipe.threads, recipe.steps) == ("base", 1, 1, 3)
    assert recipe.model == {"hidden_size": 16, "local_window": 4}
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_base_is_changed_key_by_key(base: Path) -> None:
    child = base.with_name("child.yaml")
    child.write_text("base: base.yaml\nname: child\nmodel: {local_window: 9, compression_stride: 4}\n")
    grandchild = base.with_name("grandchild.yaml")
    grandchild.write_text("base: child.yaml\nseed: 7\noptimiser: {learning_rate: 0.5}\n")
    assert read_recipe(child).model == {"hidden_size": 16, "local_window": 9, "compression_stride": 4}
    recipe = read_recipe(grandchild)
    assert (recipe.name, recipe.seed) == ("child", 7)
    assert recipe.optimiser == Optimiser(learning_rate=0.5, warmup_steps=2)
    assert recipe.stages == read_recipe(base).stages
    assert read_recipe(base).model == {"hidden_size": 16, "local_window": 4}


def test_overrides(base: Path) -> None:
    recipe = read_recipe(base, ("seed=9", "model.compression_stride=4", "optimiser.betas=[0.8, 0.9]", "probe.items=3"))
    assert recipe.seed == 9
    assert recipe.model["compression_stride"] == 4
    assert recipe.optimiser.betas == (0.8, 0.9)
    assert recipe.probe == {"items": 3}
    assert read_recipe(base, ("seed=2", "seed=3")).seed == 3
    assert read_recipe(base, ("name=a=b",)[:0]).name == "base"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", ["'seed'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("seed.x=3", ["'seed'", "single value"]),
        ("stages.0.steps=3", ["'stages'", "single value"]),
        ("seed=[", ["seed=[", "not YAML"]),
        ("seed=-1", ["seed", "-1"]),
        ("sed=1", ["sed", "given: 1"]),
        ("name=No Name", ["name", "No Name"]),
        ("optimiser.learning_rate=0", ["optimiser.learning_rate", "greater than 0"]),
        ("optimiser.decay_from=2", ["optimiser.decay_from"]),
        ("stages=[]", ["stages"]),
    ],
)
def test_bad_overrides_are_one_line(base: Path, override: str, words: list[str]) -> None:
    refused(base, *words, overrides=(override,))


def test_bad_files_are_one_line(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    refused(tmp_path / "none.yaml", "none.yaml", "No such file")
    refused(tmp_path, "Is a directory")
    for text, words in [
        ("name: [", ["not YAML"]),
        ("", ["holds no settings"]),
        ("- a\n", ["holds no settings"]),
        ("base: none.yaml\n", ["none.yaml", "No such file"]),
        ("base: [1]\n", ["base", "[1]"]),
        (BASE + "nonsense: 1\n", ["nonsense"]),
        (
            BASE.replace("pairs: 3", "pairs: 7"),
            ["stages.0", "7 pairs and a lead of 8 do not fit into 16 context tokens"],
        ),
        (BASE.replace("seed: 1", "seed: one"), ["seed", "'one'"]),
    ]:
        path.write_text(text)
        refused(path, *words)
    path.write_bytes(b"\xff\xfe\x00")
    refused(path, "not YAML")
    path.write_text("base: bad.yaml\n")
    refused(path, "bad.yaml", "its own base")
    (tmp_path / "other.yaml").write_text("base: bad.yaml\n")
    path.write_text("base: other.yaml\n")
    refused(path, "its own base")


@given(
    peak=st.floats(1e-5, 1),
    warmup=st.integers(0, 20),
    decay_from=st.floats(0, 1),
    final=st.floats(0, 1),
    steps=st.integers(1, 60),
)
def test_learning_rate(peak: float, warmup: int, decay_from: float, final: float, steps: int) -> None:
    """Linear up, flat, linear down, written as a minimum of three lines instead of by cases."""
    optimiser = Optimiser(learning_rate=peak, warmup_steps=warmup, decay_from=decay_from, final_share=final)
    for step in range(steps):
        up = 1.0 if warmup == 0 else (step + 1) / warmup
        down = 1.0
        if step >= decay_from * steps:
            down = max(final, (steps - step) / max(steps * (1 - decay_from), 1.0))
        expected = peak * min(1.0, up) * min(1.0, down)
        assert optimiser.rate(step, steps) == pytest.approx(expected)


def test_learning_rate_by_hand() -> None:
    optimiser = Optimiser(learning_rate=0.01, warmup_steps=4, decay_from=0.6, final_share=0.3)
    rates = [round(optimiser.rate(step, 20), 5) for step in range(20)]
    assert rates[:5] == [0.0025, 0.005, 0.0075, 0.01, 0.01]
    assert rates[5:13] == [0.01] * 8
    assert rates[13:] == [0.00875, 0.0075, 0.00625, 0.005, 0.00375, 0.003, 0.003]


def test_the_recipes_of_the_bundled_models_are_matched() -> None:
    """They differ in name, purpose and compression, and in nothing else."""
    recipes = {name: read_recipe(RECIPES / f"{name}.yaml") for name in ("full", "w8s8", "w4s4")}
    for name, recipe in recipes.items():
        assert recipe.name == name
        grid = {key: recipe.model.get(key) for key in ("compression_window", "compression_stride")}
        expected = {"full": None, "w8s8": 8, "w4s4": 4}[name]
        assert set(grid.values()) == {expected}
        plain = recipe.model_dump(exclude={"name", "purpose"})
        plain["model"] = {k: v for k, v in recipe.model.items() if not k.startswith("compression_")}
        assert plain == recipes["full"].model_dump(exclude={"name", "purpose"})
        assert set(yaml.safe_load((RECIPES / f"{name}.yaml").read_text())) <= {
            "base",
            "name",
            "purpose",
            "model",
        } or (name == "full")
