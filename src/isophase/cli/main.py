"""The `isophase` command. One file per command; this one only assembles them and handles faults."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from isophase import __version__
from isophase.cli import audit, compare, models, plan, report, show, train
from isophase.errors import EXIT_USAGE, IsophaseError

app = typer.Typer(
    name="isophase",
    help="Measure, explain and fix phase sensitivity in language models with chunked KV-cache compression.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of a fault."),
) -> None:
    if debug:
        os.environ["ISOPHASE_DEBUG"] = "1"
    if version:
        typer.echo(f"isophase {__version__}")
        raise typer.Exit


app.command("audit")(audit.audit)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("show")(show.show)
app.command("models")(models.models)
app.command("train")(train.train)


def main() -> None:
    """Entry point: faults that users can mend become one line and an exit code."""
    # The first import of tokenizers warns about forking in every subprocess otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except IsophaseError as error:
        if os.environ.get("ISOPHASE_DEBUG"):
            raise
        Console(stderr=True, soft_wrap=True).print(f"isophase: {error}", markup=False, highlight=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        Console(stderr=True).print("isophase: interrupted; repeat the command to resume.", markup=False)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is not a fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
