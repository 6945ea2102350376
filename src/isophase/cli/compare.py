"""`isophase compare`: two runs on the same items, paired."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isophase.audit import compare_runs
from isophase.cli import options as opt


def compare(
    first: Annotated[Path, typer.Argument(help="Run folder, say of the compressed model.", show_default=False)],
    second: Annotated[
        Path, typer.Argument(help="Run folder of the other model, asked the same items.", show_default=False)
    ],
    json: opt.Json = None,
) -> None:
    """The paired contrast of two runs on the same items: accuracy, gap and the phases that differ.

    Compares the first target of FIRST with the first part of SECOND that was asked the same prompts. The same
    folder twice compares its first target with its next one or its control.
    """
    result = compare_runs(first, second, opt.opener_of)
    opt.write_json(result.model_dump_json(indent=2) + "\n", json)
    console = opt.console_for_people(json)
    for line in (result.sentence, "", *result.rows()):
        console.print(line, markup=False, soft_wrap=True)
