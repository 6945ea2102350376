"""`isophase train`: train a model from a recipe."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isophase.errors import EXIT_INTERRUPTED, IsophaseError


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a YAML file such as recipes/w8s8.yaml.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, to change one setting of the recipe; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the model. Default: models/NAME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished run from its last checkpoint.")
    ] = False,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.", min=0.0)] = 5.0,
    checkpoint_steps: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, besides the minutes.", min=1)
    ] = None,
    keep_steps: Annotated[
        int | None,
        typer.Option(help="Keep the model every so many steps, as step-N; `explain` shows them.", min=1),
    ] = None,
) -> None:
    """Train one model: weights, tokenizer, curve and record in one folder.

    Over several devices: accelerate launch --num_processes N -m isophase.cli.main train RECIPE --out DIR
    """
    try:
        from isophase.lab.train import Cadence, read_recipe
        from isophase.lab.train import train as run
    except ImportError as error:
        raise IsophaseError(
            f"training needs torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    chosen = read_recipe(recipe, tuple(set_ or ()))
    folder = out or Path("models") / chosen.name
    command = "isophase " + shlex.join(sys.argv[1:])
    cadence = Cadence(minutes=checkpoint_minutes, steps=checkpoint_steps, keep_steps=keep_steps)
    try:
        record = run(chosen, folder, command, Console(stderr=True), resume=resume, cadence=cadence)
    except KeyboardInterrupt:
        Console(stderr=True, soft_wrap=True).print(
            "isophase: interrupted; add --resume to go on from the last checkpoint.", markup=False, highlight=False
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if os.environ.get("RANK", "0") != "0":
        return  # one of many processes, and not the one that speaks
    Console(highlight=False, soft_wrap=True).print(
        f"{record.name}: {record.steps:,} steps in {record.seconds / 60:.1f} min, loss "
        f"{record.final_loss:.3f}, "
        f"accuracy {record.final_accuracy:.3f}. Audit it with: isophase audit hf:{folder}",
        markup=False,
    )
