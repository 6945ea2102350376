"""`isophase report`: draw a run folder again."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from isophase.audit.analyse import build_report
from isophase.audit.report import print_report, render_json, write_report
from isophase.audit.store import read_plan
from isophase.cli import options as opt


def report(
    run: Path = typer.Argument(help="Run folder of an audit.", show_default=False),
    json: opt.Json = None,
) -> None:
    """Write report.json and report.html of a run folder, and print the verdicts. Asks the model nothing."""
    open_target = opt.opener(read_plan(run).settings.gguf_file)
    result = build_report(run, lambda spec: open_target(spec).tokenizer)
    html = write_report(result, run)
    console = Console(stderr=json is not None and str(json) == "-")
    print_report(result, console)
    console.print(f"\nReport: {html}", soft_wrap=True, markup=False, highlight=False)
    opt.write_json(render_json(result), json)
