"""`isophase report`: draw a run folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isophase.audit import build_report, read_plan
from isophase.audit.report import print_report, render_json
from isophase.cli import options as opt


def report(
    run: Annotated[Path, typer.Argument(help="Run folder of an audit.", show_default=False)],
    json: opt.Json = None,
) -> None:
    """Write report.json and report.html of a run folder, and print the verdicts. Asks the model nothing."""
    open_target = opt.opener_of(read_plan(run))
    result = build_report(run, lambda spec: open_target(spec).tokenizer)
    html = opt.save_report(result, run)
    opt.write_json(render_json(result), json)
    console = opt.console_for_people(json)
    print_report(result, console)
    console.print(f"\nReport: {html}", soft_wrap=True, markup=False)
