"""Precision, memory savers and many processes: what may change the numbers, and what may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin

from isophase.errors import IsophaseError
from isophase.lab.train.run import build_model, train, train_step
from isophase.lab.train.step import Predictor, open_accelerator
from isophase.lab.train.tasks.lookup import lookup_batch

GRID = {"compression_window": 4, "compression_stride": 4}
SOURCE = Path(__file__).parents[3] / "src"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "curve.jsonl").read_text().splitlines()]


def run(recipe, out: Path) -> list[float]:
    train(recipe, out, "")
    return losses(out)


def test_memory_savers_change_nothing_and_half_precision_little(make_recipe, tmp_path: Path) -> None:
    settings = {"model": GRID, "curve_every_steps": 1}
    plain = run(make_recipe(**settings), tmp_path / "plain")
    assert run(make_recipe(**settings, gradient_checkpointing=True), tmp_path / "recomputed") == plain
    micro = run(make_recipe(**settings, micro_batch=1), tmp_path / "micro")
    assert micro == pytest.approx(plain, rel=1e-4)
    half = run(make_recipe(**settings, precision="bf16"), tmp_path / "half")
    assert half != plain
    assert half == pytest.approx(plain, rel=0.02)
    # One precision does not leak into the next run of this process.
    assert run(make_recipe(**settings, precision="fp32"), tmp_path / "again") == plain


def test_a_batch_in_parts_has_the_gradient_of_the_whole(make_recipe) -> None:
    recipe = make_recipe(model=GRID)
    gradients = []
    for micro_batch in (None, 1, 3):
        model = build_model(recipe)
        batch = lookup_batch(recipe.stages[0], np.random.default_rng(0))
        labels = batch.labels.copy()
        labels[0, -1] = -100  # parts of unequal weight
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch.ids, labels, 1e9, None, micro_batch)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ["compressed_qwen3", "deepseek_v4"])
def test_fsdp_finds_where_to_cut(make_recipe, architecture: str) -> None:
    recipe = make_recipe(model=GRID) if architecture == "compressed_qwen3" else None
    if recipe is None:
        from isophase.lab.train.recipe import read_recipe

        recipe = read_recipe(Path(__file__).parents[3] / "recipes" / "deepseek_v4.yaml")
    predictor = Predictor(build_model(recipe))
    names = {type(module).__name__ for module in predictor.modules()}
    assert set(predictor._no_split_modules) <= names
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    plugin.set_auto_wrap_policy(predictor)
    assert plugin.auto_wrap_policy is not None


def test_more_processes_than_sequences_are_refused(make_recipe, monkeypatch) -> None:
    import isophase.lab.train.step as module

    class Many:
        num_processes = 3

    monkeypatch.setattr(module, "Accelerator", lambda **_: Many())
    with pytest.raises(IsophaseError, match="batch of 2 cannot be spread over 3 processes"):
        open_accelerator(make_recipe())


def launch(recipe, path: Path, out: Path, processes: int) -> list[float]:
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    # `accelerate launch --cpu` starts several processes only through MPI; `--multi_gpu` uses torchrun, and
    # the variable keeps it on the CPU.
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += (
        ["--multi_gpu", "--num_processes", str(processes)] if processes > 1 else ["--cpu", "--num_processes", "1"]
    )
    command += ["-m", "isophase.cli.main", "train", str(path), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Audit it with") == 1
    return losses(out)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_two_processes_follow_the_curve_of_one(make_recipe, tmp_path: Path, micro_batch) -> None:
    stages = [{"context_tokens": 24, "pairs": 6, "queries": 4, "batch": 9, "steps": 20}]
    recipe = make_recipe(model=GRID, stages=stages, curve_every_steps=1, micro_batch=micro_batch)
    one = launch(recipe, tmp_path / "r.yaml", tmp_path / "one", 1)
    two = launch(recipe, tmp_path / "r.yaml", tmp_path / "two", 2)
    assert len(one) == len(two) == 20
    assert two == pytest.approx(one, rel=1e-5)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] != weights[1]  # sums in another order: there really were two


@pytest.mark.slow
def test_compiled_training_follows_the_plain_curve(make_recipe, tmp_path: Path) -> None:
    stages = [{"context_tokens": 16, "pairs": 3, "queries": 2, "batch": 4, "steps": 3}]
    settings = {"model": GRID, "stages": stages, "curve_every_steps": 1}
    plain = run(make_recipe(**settings), tmp_path / "plain")
    assert run(make_recipe(**settings, compile=True), tmp_path / "compiled") == pytest.approx(plain, rel=1e-4)
