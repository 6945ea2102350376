"""`isophase repair`: raise the worst phase of a model whose weights are open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from isophase.atomic import write_atomically
from isophase.cli import options as opt
from isophase.errors import IsophaseError
from isophase.specs import model_spec


def repair(
    model: Annotated[str, typer.Argument(help="Folder of a model, hf:PATH or isophase:NAME.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the repaired model and repair.json.", show_default=False)],
    method: Annotated[
        str, typer.Option(help="flatten, roll, refit (gates alone) or regrid (another memory, everything fine-tuned).")
    ] = "refit",
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="For regrid, KEY=VALUE of the configuration, or a YAML file of such; repeat it. "
            "Default: grid_shift=heads."
        ),
    ] = None,
    probe: Annotated[str, typer.Option(help="records, prefix or in-sequence.")] = "records",
    records: Annotated[int, typer.Option(help="Records per prompt.", min=2)] = 24,
    length: Annotated[int, typer.Option(help="Tokens per prompt.", min=16)] = 114,
    items: Annotated[int, typer.Option(help="Items of choice and judgement.", min=8)] = 96,
    steps: Annotated[int, typer.Option(help="Steps of refit and regrid.", min=8)] = 240,
    rate: Annotated[float, typer.Option(help="Learning rate of refit and regrid.")] = 3e-3,
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """Raise a model's worst phase: exchange, average or refit its gates, or change its grid and fine-tune.

    Calibration, choice and judgement use different prompts. A repair that does not raise the worst phase, or lowers
    the mean, is not saved; exit code 11 says so.
    """
    try:
        from isophase.mitigate.repair import METHODS, RepairSettings
        from isophase.mitigate.repair import repair as run
        from isophase.targets import HuggingFaceTarget
    except ImportError as error:
        raise IsophaseError(
            f"a repair needs torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    if method not in METHODS:
        raise IsophaseError(f"--method {method!r} is unknown.", f"Give {', '.join(METHODS)}.")
    if out.exists() and any(out.iterdir()):
        raise IsophaseError(f"{str(out)!r} is not empty.", "Choose another --out.")
    spec = model_spec(model).text
    target = opt.opener(None)(spec)
    assert isinstance(target, HuggingFaceTarget)
    settings = RepairSettings(
        method=method,
        probe=probe,
        records=records,
        length_tokens=length,
        items=items,
        steps=steps,
        learning_rate=rate,
        memory=_memory(memory),
        seed=seed,
    )
    progress = Console(stderr=True)
    with progress.status("measuring") as status:
        repaired, found = run(target.model, target.tokenizer, settings, status.update)
    console = opt.console_for_people(json)
    for name, curve in (("before", found.before), ("after", found.after)):
        low, high = curve.worst_interval
        mean_low, mean_high = curve.mean_interval
        console.print(
            f"{name:7} worst {curve.worst:.3f} ({low:.3f} to {high:.3f}) at phase {curve.worst_phase}, mean "
            f"{curve.mean:.3f} ({mean_low:.3f} to {mean_high:.3f}); by phase "
            + " ".join(f"{value:.2f}" for value in curve.by_phase),
            soft_wrap=True,
        )
    console.print(f"{found.change}.", soft_wrap=True, markup=False)
    if method != "regrid" and found.after.worst_phase in found.boundary_phases:
        console.print(
            f"At phase {found.after.worst_phase} a chunk edge cuts the record. No gate mends that: change the grid "
            "(--method regrid), vote over shifts, or align prompts.",
            soft_wrap=True,
        )
    text = found.model_dump_json(indent=2) + "\n"
    opt.write_json(text, json)
    if not found.kept:
        console.print("Not kept: the worst phase did not rise, or the mean fell. No model is written.")
        raise typer.Exit(11)
    repaired.save_pretrained(out)
    target.tokenizer.save(out)
    write_atomically(out / "repair.json", text)
    console.print(f"Model: {out}", soft_wrap=True, markup=False)


def _memory(given: list[str] | None) -> dict[str, object] | None:
    """Settings from KEY=VALUE, values as in YAML, and from files; later ones win."""
    if not given:
        return None
    found: dict[str, object] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if sign:
            found[key] = yaml.safe_load(value)
            continue
        try:
            settings = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise IsophaseError(
                f"--memory {text!r} is no KEY=VALUE and no YAML file.", "Write it like grid_shift=heads."
            ) from error
        if not isinstance(settings, dict):
            raise IsophaseError(f"{text!r} holds no settings.", "Write them like grid_shift: heads.")
        found |= settings
    return found
