"""`isophase invariants`: faults that look like phase."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from isophase.audit import run_invariants
from isophase.cli import options as opt
from isophase.errors import EXIT_NONE, EXIT_SENSITIVE

_STYLES = {"pass": "green", "fail": "bold red", "not testable": "dim"}


def invariants(
    target: Annotated[
        str,
        typer.Argument(help="isophase:NAME, hf:PATH_OR_ID or http://HOST:PORT/v1#MODEL.", show_default=False),
    ],
    stride: Annotated[
        int | None, typer.Option(help="Stride in tokens. Default: the longest that the configuration names, else 8.")
    ] = None,
    gguf: opt.Gguf = None,
    server: opt.Server = "auto",
    tokenizer: opt.TokenizerOption = None,
    concurrency: opt.Concurrency = 16,
    timeout: opt.Timeout = 600.0,
    json: opt.Json = None,
) -> None:
    """Faults that look like phase sensitivity: run this before blaming the phase.

    Splits the prefill and starts decoding at every residue, asks short prompts after other requests, compares warm
    with cold prefixes, orders, batches and paddings. Exit codes: 0 nothing fails, 10 something does, 2 usage,
    3 server unreachable.
    """
    opened = opt.opener(gguf, opt.server_options(server, tokenizer, concurrency, timeout))(target)
    with Console(stderr=True).status("reading the model") as status:
        report = run_invariants(opened, stride_tokens=stride, say=status.update)
    opt.write_json(report.model_dump_json(indent=2) + "\n", json)
    console = opt.console_for_people(json)
    console.print(report.sentence + "\n", markup=False, soft_wrap=True)
    for found in report.invariants:
        measured = ""
        if found.largest_difference is not None and found.limit is not None:
            measured = f" ({found.cases} cases, largest {found.largest_difference:.2g}, limit {found.limit:.2g})"
        console.print(f"{found.status:<12}", style=_STYLES[found.status], end="  ")
        console.print(f"{found.name}: {found.detail}{measured}", markup=False, soft_wrap=True)
        if found.smallest_failing_input:
            console.print(f"{'':<14}smallest: {found.smallest_failing_input}", markup=False, soft_wrap=True)
            console.print(f"{'':<14}{found.explanation}", markup=False, soft_wrap=True)
    raise typer.Exit(EXIT_SENSITIVE if report.failed else EXIT_NONE)
