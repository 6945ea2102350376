"""`isophase show`: the exact prompt of one row."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from isophase.audit import read_answers, read_plan
from isophase.cli import options as opt
from isophase.errors import IsophaseError
from isophase.probes import build_probe


def show(
    run: Annotated[Path, typer.Argument(help="Run folder of an audit.", show_default=False)],
    row: Annotated[int, typer.Option("--row", help="Row of the run, from 0.")] = 0,
    json: opt.Json = None,
) -> None:
    """The exact prompt of a row, ids and text, rebuilt from its recipe; and its answer, if there is one."""
    plan = read_plan(run)
    try:
        part = plan.part_of(row)
    except IndexError:
        raise IsophaseError(f"--row is {row}; this run has rows 0 to {plan.rows - 1}.", "Give one of these.") from None
    tokenizer = opt.opener_of(plan)(part.target).tokenizer
    prompt = build_probe(part.probe, tokenizer).prompt(row - part.first_row)
    answer = read_answers(run)[0].get(row)
    axis = part.stride_tokens
    facts: dict[str, object] = {
        "row": row,
        "target": part.target,
        "probe": part.probe.probe,
        "item": prompt.item,
        "column": prompt.column,
        "tokens": len(prompt.ids),
        "position_tokens": prompt.position_tokens,
        "span_tokens": prompt.span_tokens,
        "phase": prompt.position_tokens % axis if axis else None,
        "ids": prompt.ids.tolist(),
        "text": tokenizer.decode(prompt.ids.tolist()),
        "answer_ids": list(prompt.answer_ids),
        "answer_text": tokenizer.decode(prompt.answer_ids),
        "status": answer.status if answer else "not asked yet",
        "correct": answer.correct if answer else None,
        "log_probability": answer.log_probability if answer else None,
        "output_text": tokenizer.decode(answer.output_ids) if answer else None,
    }
    opt.write_json(dumps(facts, indent=2) + "\n", json)
    console = opt.console_for_people(json)
    for name, value in facts.items():
        console.print(f"[bold]{name}[/bold]: ", end="")
        console.print(repr(value) if name.endswith("text") else str(value), markup=False, soft_wrap=True)
