"""`isophase sweep`: many matched runs, one table."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isophase.errors import EXIT_INTERRUPTED, IsophaseError


class Engine(StrEnum):
    """What starts the runs."""

    LOCAL = "local"
    RAY = "ray"


def sweep(
    sweep: Annotated[
        Path, typer.Argument(help="Sweep, a YAML file such as recipes/sweeps/strides.yaml.", show_default=False)
    ],
    engine: Annotated[
        Engine, typer.Option(help="local: this machine; ray: a cluster, or this machine.")
    ] = Engine.LOCAL,
    jobs: Annotated[int, typer.Option(help="Processes of the local engine.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for everything. Default: sweeps/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep; finished runs are skipped.")] = False,
) -> None:
    """Train and audit matched models: one table, one page with all curves."""
    try:
        from isophase.lab.sweep import markdown, open_folder, read_sweep, run_local, run_on_ray, write_tables
    except ImportError as error:
        raise IsophaseError(
            f"a sweep needs torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    chosen = read_sweep(sweep)
    folder = out or Path("sweeps") / chosen.name
    open_folder(chosen, folder, resume=resume)
    console = Console(stderr=True)
    try:
        if engine == Engine.RAY:
            failed = run_on_ray(chosen, folder, console)
        else:
            failed = run_local(chosen, folder, jobs, console)
    except KeyboardInterrupt:
        console.print("isophase: interrupted; add --resume to go on.", markup=False, highlight=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    rows = write_tables(chosen, folder, failed)
    typer.echo(markdown(rows))
    typer.echo(f"Page: {folder / 'index.html'}")
    if failed:
        name, problem = next(iter(failed.items()))
        raise IsophaseError(
            f"{len(failed)} of {len(chosen.runs)} runs failed, such as {name}: {problem}", "Mend it and add --resume."
        )
