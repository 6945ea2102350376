"""`isophase check`: one's own prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isophase.audit import CheckResult, run_check
from isophase.cli import options as opt
from isophase.errors import EXIT_INCONCLUSIVE, EXIT_NONE, EXIT_SENSITIVE, IsophaseError
from isophase.probes import OwnPrompt, read_prompt

_EXIT_CODES = {"stable": EXIT_NONE, "sensitive": EXIT_SENSITIVE, "inconclusive": EXIT_INCONCLUSIVE}


def check(
    prompt: Annotated[Path, typer.Argument(help="Text file that ends where the answer starts.", show_default=False)],
    target: Annotated[
        str,
        typer.Option(help="isophase:NAME, hf:PATH_OR_ID or http://HOST:PORT/v1#MODEL.", show_default=False),
    ],
    expect: Annotated[str | None, typer.Option(help="The right answer, as the target should write it.")] = None,
    stable: Annotated[
        bool, typer.Option("--stable", help="Hold all answers against that of the prompt as it is.")
    ] = False,
    at: Annotated[
        str,
        typer.Option(
            help="Text in the prompt before which tokens are inserted; must be there once. Default: the start."
        ),
    ] = "",
    shifts: Annotated[
        str, typer.Option(help="auto (three strides, 48 where none is known), or the most tokens to insert.")
    ] = "auto",
    answer_tokens: Annotated[int, typer.Option(help="Tokens of the answer that --stable compares.", min=1, max=64)] = 8,
    gguf: opt.Gguf = None,
    server: opt.Server = "auto",
    tokenizer: opt.TokenizerOption = None,
    concurrency: opt.Concurrency = 16,
    timeout: opt.Timeout = 600.0,
    json: opt.Json = None,
) -> None:
    """Does the answer to my own prompt depend on a few neutral tokens in it?

    Inserts 0, 1, 2, ... neutral tokens at a mark and keeps everything else.
    Exit codes: 0 stable, 10 the answer changes, 11 inconclusive, 2 usage, 3 server unreachable.
    """
    if (expect is None) == (not stable):
        raise IsophaseError("say what to hold answers against.", "Give either --expect TEXT or --stable.")
    if shifts != "auto" and not shifts.isdecimal():
        raise IsophaseError(f"--shifts is {shifts!r}.", "Give auto or a number of tokens.")
    text = read_prompt(prompt)
    opened = opt.opener(gguf, opt.server_options(server, tokenizer, concurrency, timeout))(target)
    own = OwnPrompt(text=text, tokenizer=opened.tokenizer, mark=at)
    with Console(stderr=True).status("reading") as status:
        result = run_check(
            own,
            opened,
            expected=expect,
            shifts=None if shifts == "auto" else int(shifts),
            answer_tokens=answer_tokens,
            advance=lambda done, total: status.update(f"asked {done} of {total} prompts"),
        )
    opt.write_json(result.model_dump_json(indent=2) + "\n", json)
    _print(result, opt.console_for_people(json))
    raise typer.Exit(_EXIT_CODES[result.verdict])


def _print(result: CheckResult, console: Console) -> None:
    console.print(result.verdict.upper(), style="bold")
    console.print(result.sentence, markup=False, soft_wrap=True)
    mark = f"{result.tokens:,} tokens, neutral ones inserted at position {result.position_tokens:,}"
    console.print(f"Prompt: {mark}. Answer: {result.answer!r}.\n", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("shift", "phase", "answer", "log-probability", "says"):
        table.add_column(heading, justify="left" if heading in ("answer", "says") else "right", overflow="fold")
    for row in result.shifts:
        same = "same" if row.same else "other" if row.same is not None else row.status
        value = row.log_probability
        table.add_row(
            str(row.shift_tokens),
            "" if row.phase is None else str(row.phase),
            same,
            "n/a" if value is None or not math.isfinite(value) else f"{value:.2f}",
            Text("" if row.same else repr(row.output) if row.same is not None else row.detail),
        )
    console.print(table)
    for title, lines in (("Why", result.reasons), ("What to do next", result.advice), ("Limits", result.notes)):
        if lines:
            console.print(f"\n[bold]{title}[/bold]")
            for line in lines:
                console.print(f"  - {line}", markup=False, soft_wrap=True)
