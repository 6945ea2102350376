"""`isophase explain`: where in a model its phase effect comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isophase.atomic import write_atomically
from isophase.cli import options as opt
from isophase.errors import IsophaseError


def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of a model, isophase:NAME or hf:PATH_OR_ID. Subfolders step-N are read as its training.",
            show_default=False,
        ),
    ],
    probe: Annotated[str, typer.Option(help="records, prefix or in-sequence.")] = "records",
    items: opt.Items = None,
    stride: Annotated[
        int | None, typer.Option(help="Phase axis in tokens for a model without a compressor. Default: 8.", min=2)
    ] = None,
    seed: opt.Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for explain.html and explain.json. Default: isophase-explain/NAME.")
    ] = None,
    json: opt.Json = None,
) -> None:
    """Where in a model its phase effect comes from: knockouts, gates, cycling and the four causes.

    Measures slot, straddle, anchor and visibility by interventions; the model's files are not changed.
    """
    try:
        from isophase.lab.explain import explain as run
        from isophase.lab.explain import render_explanation, render_json
    except ImportError as error:
        raise IsophaseError(
            f"explaining needs torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    folder = out or Path("isophase-explain") / (model.rstrip("/").replace(":", "-").rsplit("/", 1)[-1] or "model")
    progress = Console(stderr=True)
    with progress.status("reading the model") as status:
        found = run(model, probe=probe, items=items, stride_tokens=stride, seed=seed, say=status.update)
    page = render_explanation(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "explain.json", render_json(found))
        write_atomically(folder / "explain.html", page)
    except OSError as error:
        raise IsophaseError(f"cannot write to {str(folder)!r}: {error.strerror}.", "Choose another --out.") from error
    opt.write_json(render_json(found), json)
    console = opt.console_for_people(json)
    for number, sentence in enumerate(found.summary):
        console.print(("" if number == 0 else "- ") + sentence, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    console.print(f"\nPage: {folder / 'explain.html'}", markup=False, soft_wrap=True)
