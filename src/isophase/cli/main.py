"""The `isophase` command. One file per command; this one only assembles them and handles faults."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console

from isophase import __version__
from isophase.cli import (
    align,
    audit,
    check,
    compare,
    embed,
    explain,
    invariants,
    models,
    needle,
    plan,
    prefill,
    repair,
    report,
    search,
    serve,
    show,
    sweep,
    train,
)
from isophase.errors import EXIT_INTERRUPTED, IsophaseError


class _Commands(typer.core.TyperGroup):
    """Typer turns an interrupt into an exit code without a word; say that nothing is lost."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _complain("interrupted; an audit resumes when its command is repeated.")
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="isophase",
    cls=_Commands,
    help="Measure, explain and fix phase sensitivity in language models with chunked KV-cache compression.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"isophase {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a fault: isophase --debug COMMAND.")
    ] = False,
) -> None:
    if debug:
        os.environ["ISOPHASE_DEBUG"] = "1"


app.command("audit")(audit.audit)
app.command("check")(check.check)
app.command("invariants")(invariants.invariants)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("show")(show.show)
app.command("models")(models.models)
app.command("train")(train.train)
app.command("sweep")(sweep.sweep)
app.command("explain")(explain.explain)
app.command("needle")(needle.needle)
app.command("repair")(repair.repair)
app.add_typer(embed.embed, name="embed")
app.add_typer(prefill.prefill, name="prefill")
app.command("search")(search.search)
app.command("align")(align.align)
app.command("serve")(serve.serve)


def main() -> None:
    """Entry point: faults that users can mend become one line and an exit code."""
    # The first import of tokenizers warns about forking in every subprocess otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except IsophaseError as error:
        if os.environ.get("ISOPHASE_DEBUG"):
            traceback.print_exc()
        else:
            _complain(str(error))
        sys.exit(error.exit_code)


def _complain(text: str) -> None:
    # One line, whatever a path or a library's message holds.
    line = " ".join(text.splitlines())
    Console(stderr=True, soft_wrap=True).print(f"isophase: {line}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
