"""A run that is killed at any instant and resumed ends with the files of an undisturbed one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from isophase.errors import IsophaseError
from isophase.lab.train.checkpoint import read_checkpoint
from isophase.lab.train.run import Cadence, train

OFTEN = Cadence(minutes=60, steps=3, keep_steps=30)
SAME = ("curve.jsonl", "model.safetensors", "config.json", "recipe.json", "tokenizer.json")


@pytest.fixture
def recipe(make_recipe):
    stages = [
        {"context_tokens": 16, "pairs": 3, "queries": 2, "batch": 4, "steps": 40},
        {
            "kind": "mixture",
            "parts": [
                {"context_tokens": 20, "pairs": 4, "queries": 3, "batch": 2, "steps": 30, "alone": 0.5},
                {"context_tokens": 24, "pairs": 4, "queries": 1, "batch": 3, "steps": 20},
            ],
        },
    ]
    model = {"compression_window": 4, "compression_stride": 4, "attention_dropout": 0.1}
    return make_recipe(model=model, stages=stages, curve_every_steps=4)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in SAME}


def start(recipe, out: Path, **options):
    """Train in a process of its own; forked, so that it starts at once."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(recipe, out, ""), kwargs=options)
    process.start()
    return process


def test_kill_and_resume_give_the_same_bytes(recipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "undisturbed", "", cadence=OFTEN)
    rng = np.random.default_rng(0)
    out = tmp_path / "killed"
    steps, kills = [], 0
    while kills < 8:
        process = start(recipe, out, resume=True, cadence=OFTEN)
        before = (out / "checkpoint.pt").stat().st_mtime_ns if (out / "checkpoint.pt").exists() else 0
        until = time.monotonic() + 30
        while time.monotonic() < until and process.is_alive():
            if (out / "checkpoint.pt").exists() and (out / "checkpoint.pt").stat().st_mtime_ns > before:
                break
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        if (state := read_checkpoint(out)) is not None:
            steps.append(state["progress"]["step"])
        assert not (out / "training.json").exists()
    assert kills >= 3
    assert steps == sorted(steps)
    assert steps[-1] > 6
    record = train(recipe, out, "", resume=True, cadence=OFTEN)
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert record.tokens == 40 * 4 * 22 + 30 * 2 * 29 + 20 * 3 * 27
    assert record.sequences == 40 * 4 + 30 * 2 + 20 * 3
    assert not (out / "checkpoint.pt").exists()
    assert not list(out.glob(".*"))
    for step in ("step-30", "step-60", "step-90"):
        kept, undisturbed = out / step, tmp_path / "undisturbed" / step
        assert {file.name for file in kept.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
        assert (kept / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert (out / "step-90" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    # Finished: a second resume changes nothing.
    before = contents(out)
    assert train(recipe, out, "", resume=True) == record
    assert contents(out) == before


@pytest.mark.parametrize("last", [0, 3, 7, 17])
def test_a_curve_longer_than_the_checkpoint_is_cut(recipe, tmp_path: Path, last: int, monkeypatch) -> None:
    """Killed right after step `last`, whatever was written by then."""
    import isophase.lab.train.run as module

    short = [stage.model_copy(update={"steps": 6}) for stage in (recipe.stages[0], *recipe.stages[1].parts)]
    mixture = recipe.stages[1].model_copy(update={"parts": tuple(short[1:])})
    recipe = recipe.model_copy(update={"stages": (short[0], mixture)})
    train(recipe, tmp_path / "undisturbed", "")
    real, done = module.train_step, []

    def step(*arguments):
        if len(done) == last:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments)

    out = tmp_path / "stopped"
    monkeypatch.setattr(module, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out, "", cadence=Cadence(minutes=60, steps=5))
    with (out / "curve.jsonl").open("ab") as file:
        file.write(b'{"step": 999, "torn')
    monkeypatch.undo()
    train(recipe, out, "", resume=True)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_an_unfinished_folder_needs_resume(recipe, tmp_path: Path, monkeypatch) -> None:
    import isophase.lab.train.run as module

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "m", "")
    with pytest.raises(IsophaseError, match=r"unfinished run\. Add --resume"):
        train(recipe, tmp_path / "m", "")
    other = recipe.model_copy(update={"seed": 9})
    with pytest.raises(IsophaseError, match="another recipe \\(seed is 5 there and 9 here"):
        train(other, tmp_path / "m", "", resume=True)
    (tmp_path / "m" / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(IsophaseError, match=r"checkpoint\.pt is damaged"):
        train(recipe, tmp_path / "m", "", resume=True)


def test_one_trainer_a_folder(recipe, tmp_path: Path) -> None:
    process = start(recipe, tmp_path / "m", cadence=OFTEN)
    while not (tmp_path / "m" / "checkpoint.pt").exists():
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(IsophaseError, match="in use by another process"):
            train(recipe, tmp_path / "m", "", resume=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def test_torch_keeps_its_own_random_state(recipe, tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(recipe, tmp_path / "m", "")
    assert torch.equal(torch.get_rng_state(), before)
