"""`isophase compare`: two runs on the same items, paired."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from isophase.audit.compare import compare_runs
from isophase.cli import options as opt


def compare(
    first: Path = typer.Argument(help="Run folder, say of the compressed model.", show_default=False),
    second: Path = typer.Argument(help="Run folder of the other model, asked the same items.", show_default=False),
    json: opt.Json = None,
) -> None:
    """The paired contrast of two runs on the same items: accuracy, gap and the phases that differ."""
    result = compare_runs(first, second, lambda gguf: opt.opener(gguf))
    opt.write_json(result.model_dump_json(indent=2) + "\n", json)
    if json is not None and str(json) == "-":
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(result.sentence, markup=False)
    console.print()
    for row in result.rows():
        console.print(row, markup=False)
