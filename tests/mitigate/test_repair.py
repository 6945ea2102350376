"""Repairs raise the worst phase or leave the model alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import isophase
from isophase.cli.main import main
from isophase.cli.repair import _memory
from isophase.errors import IsophaseError
from isophase.lab.explain.anatomy import gate_branches, roll
from isophase.mitigate.repair.run import RepairSettings, _with_memory, repair
from isophase.mitigate.specs import open_target

SMALL = {"items": 16, "records": 24, "length_tokens": 114}


@pytest.fixture
def w4s4():
    target = open_target("isophase:w4s4")
    return target.model, target.tokenizer


def test_a_roll_undoes_a_roll(w4s4) -> None:
    """Gates that were moved by one offset are found and moved back by three."""
    model, tokenizer = w4s4
    gates = [p for branch in gate_branches(model) for p in branch.gates]
    whole = [p.detach().clone() for p in gates]
    with torch.no_grad():
        for parameter in gates:
            parameter.copy_(roll(1, 4)(parameter.detach().clone()))
    _, found = repair(model, tokenizer, RepairSettings(method="roll", **SMALL))
    assert found.kept
    assert found.change == "gates moved 3 offsets further"
    assert found.after.mean > found.before.mean + 0.2
    assert all(torch.equal(a, b) for a, b in zip(gates, whole, strict=True))


def test_what_does_not_help_is_not_kept(w4s4) -> None:
    model, tokenizer = w4s4
    before = {name: p.clone() for name, p in model.state_dict().items()}
    _, found = repair(model, tokenizer, RepairSettings(method="flatten", **SMALL))
    assert not found.kept
    assert found.change.startswith("nothing that was tried")
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_refitting_changes_gates_only_and_never_ends_worse_than_it_began(w4s4) -> None:
    model, tokenizer = w4s4
    before = {name: p.clone() for name, p in model.state_dict().items()}
    _, found = repair(model, tokenizer, RepairSettings(method="refit", steps=16, **SMALL))
    moved = {name for name, p in model.state_dict().items() if not torch.equal(p, before[name])}
    assert all("gate" in name for name in moved)
    assert [step for step, _, _ in found.steps] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    by_step = {step: (worst, mean) for step, worst, mean in found.steps}
    mean_may_be = by_step[0][1] - 0.01
    assert by_step[found.kept_step][0] == max(worst for worst, mean in by_step.values() if mean >= mean_may_be)
    assert all(p.requires_grad for p in model.parameters())


def test_another_memory_takes_over_what_fits(w4s4) -> None:
    model, _ = w4s4
    other = _with_memory(model, {"compression_window": 8})
    own, taken = model.state_dict(), other.state_dict()
    name = "model.layers.0.self_attn.compressor.keys.payload_WDC"
    assert torch.equal(taken[name][:4], own[name])
    assert torch.equal(taken[name][7], own[name][3])
    assert torch.equal(taken["model.embed_tokens.weight"], own["model.embed_tokens.weight"])
    with pytest.raises(IsophaseError, match="impossible"):
        _with_memory(model, {"compression_window": 2})


def test_chunks_by_content_can_take_over_a_fixed_grid(w4s4) -> None:
    model, tokenizer = w4s4
    file = Path(isophase.__file__).parents[2] / "recipes" / "memories" / "keys8.yaml"
    memory = _memory([str(file), "chunk_overlap=1"])
    assert memory is not None
    other = _with_memory(model, memory)
    assert other.config.chunk_rule == "local_maximum"
    assert other.config.chunk_overlap == 1
    assert other.config.grid is None
    repaired, found = repair(
        model, tokenizer, RepairSettings(method="regrid", memory=memory, items=8, steps=8, records=8)
    )
    assert repaired.config.chunk_score == "ranks"
    assert found.kept_step > 0


def test_the_command_saves_a_model_that_loads(tmp_path: Path, monkeypatch, capsys) -> None:
    model = open_target("isophase:w4s4").model
    with torch.no_grad():
        for branch in gate_branches(model):
            for parameter in branch.gates:
                parameter.copy_(roll(2, 4)(parameter.detach().clone()))
    sick, well = tmp_path / "sick", tmp_path / "well"
    model.save_pretrained(sick)
    open_target("isophase:w4s4").tokenizer.save(sick)
    command = ["isophase", "repair", str(sick), "--method", "roll", "--items", "16"]
    monkeypatch.setattr("sys.argv", [*command, "--out", str(well)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "gates moved 2 offsets further" in capsys.readouterr().out
    told = json.loads((well / "repair.json").read_text())
    assert told["kept"]
    assert open_target(f"hf:{well}").tokenizer.encode("a") is not None
    gate = "model.layers.0.self_attn.compressor.keys.gate_WDK"
    mended = open_target(f"hf:{well}").model.state_dict()[gate]
    assert torch.equal(mended, open_target("isophase:w4s4").model.state_dict()[gate])
    for arguments, words in (
        (["--out", str(well)], "is not empty"),
        (["--out", str(tmp_path / "x"), "--method", "pray"], "--method 'pray' is unknown"),
        (["--out", str(tmp_path / "x"), "--method", "regrid", "--memory", "x"], "is no KEY=VALUE"),
    ):
        monkeypatch.setattr("sys.argv", [*command, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert words in capsys.readouterr().err


def test_a_model_without_a_grid_is_refused() -> None:
    target = open_target("isophase:full")
    with pytest.raises(IsophaseError, match="nothing to repair"):
        repair(target.model, target.tokenizer, RepairSettings(method="refit"))
