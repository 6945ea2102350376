"""The models that a recipe can name: transformers' DeepSeek V4, and the sizes of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.lab.train.recipe import read_recipe
from isophase.lab.train.run import build_model, train, train_step

RECIPES = Path(__file__).parents[3] / "recipes"
SHORT = "stages=[{context_tokens: 24, pairs: 6, queries: 4, batch: 4, steps: 3}]"
PAPER = sorted(RECIPES.glob("paper/*.yaml"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    pytest.importorskip("transformers.models.deepseek_v4")
    out = tmp_path_factory.mktemp("deepseek") / "model"
    recipe = read_recipe(RECIPES / "deepseek_v4.yaml", (SHORT, "name=short"))
    return recipe, train(recipe, out, ""), out


def test_deepseek_v4_trains(deepseek) -> None:
    recipe, record, out = deepseek
    assert (record.window_tokens, record.stride_tokens, record.kv_heads) == (8, 4, 1)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert type(loaded).__name__ == "DeepseekV4ForCausalLM"
    assert type(loaded).__module__.startswith("transformers.")
    assert loaded.config.record_style == "pairs"
    before = dict(build_model(recipe).named_parameters())
    for name, parameter in loaded.named_parameters():
        if name.endswith("position_bias"):
            assert before[name].any(), "drawn, not zero"
        # The indexer selects everything, so nothing flows back to it; the router has one expert to choose.
        if not name.endswith("mlp.gate.weight"):
            assert torch.equal(parameter, before[name]) == (".indexer." in name), name
    # It selects everything: more room than entries in the longest sequence of the recipe.
    longest = max(s.context_tokens + 3 * s.queries for s in read_recipe(RECIPES / "deepseek_v4.yaml").stages)
    assert loaded.config.index_topk > longest // 4


def test_deepseek_v4_is_audited_by_the_same_command(deepseek, tmp_path: Path, monkeypatch) -> None:
    out = deepseek[2]
    command = ["isophase", "audit", f"hf:{out}", "--control", "none", "--records", "4", "--length", "114"]
    monkeypatch.setattr("sys.argv", [*command, "--items", "2", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, 10, 11)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["stride_tokens"] == 4
    assert report["statuses"].get("ok", 0) + report["statuses"].get("wrong_format", 0) == report["prompts"] > 0


def test_deepseek_v4_settings_are_checked() -> None:
    with pytest.raises(IsophaseError, match="no setting 'sliding_windo'"):
        build_model(read_recipe(RECIPES / "deepseek_v4.yaml", ("model.sliding_windo=4",)))
    with pytest.raises(IsophaseError, match="layer_types"):
        build_model(read_recipe(RECIPES / "deepseek_v4.yaml", ("model.layer_types=[dense, dense]",)))


def test_full_attention_of_the_paper_is_qwen3_to_the_last_parameter() -> None:
    recipe = read_recipe(RECIPES / "paper" / "full.yaml")
    theirs = Qwen3Config(**{k: v for k, v in recipe.model.items() if k != "local_window"})
    with torch.device("meta"):
        ours = build_model(recipe)
        expected = Qwen3ForCausalLM(theirs)
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in expected.named_parameters()}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in expected.parameters()) == 596_049_920


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_recipes_are_matched(path: Path) -> None:
    recipe, full = read_recipe(path), read_recipe(RECIPES / "paper" / "full.yaml")
    assert recipe.name == f"paper-{path.stem}"
    grid = ("compression_window", "compression_stride")
    assert {k: v for k, v in recipe.model.items() if k not in grid} == full.model
    if path.stem != "full":
        assert path.stem == f"w{recipe.model[grid[0]]}s{recipe.model[grid[1]]}"
    other = {"name", "purpose", "model"}
    assert recipe.model_dump(exclude=other) == full.model_dump(exclude=other)
    tokens = sum(stage.steps * stage.batch * stage.sequence_tokens for stage in recipe.stages)
    assert tokens == pytest.approx(1e11, rel=1e-3)
    with torch.device("meta"):
        model = build_model(recipe)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (28, 1024, 151_936)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "w8s8"])
def test_one_step_at_the_size_of_the_paper(name: str) -> None:
    recipe = read_recipe(RECIPES / "paper" / f"{name}.yaml")
    model = build_model(recipe)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = np.random.default_rng(0).integers(0, 151_936, (1, 32))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)  # AdamW would take 4.8 or 8.6 GB more
    loss, _ = train_step(model, optimiser, ids, ids, 1.0)
    assert loss == pytest.approx(np.log(151_936), rel=0.1)
    assert train_step(model, optimiser, ids, ids, 1.0)[0] < loss
