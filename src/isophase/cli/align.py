"""`isophase align`: a text whose records start at strong phases."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from isophase.cli import options as opt
from isophase.errors import IsophaseError
from isophase.mitigate.align import (
    AlignedText,
    align_text,
    aligned_path,
    alignment_basis,
    format_of,
    read_text,
    undo,
    write_aligned,
)


def align(
    file: Annotated[Path, typer.Argument(help="Text in UTF-8.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Option(help="Model that will read it: isophase:NAME, hf:PATH_OR_ID or http://HOST:PORT/v1#MODEL."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Stride in tokens. Default: the curve's, else the target's.")
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Audit folder with the accuracy by phase. Default: only boundaries matter.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, a folder with one, or a hub id. Default: the target's.")
    ] = None,
    format: Annotated[str, typer.Option(help="auto (by the name), text, python, json or markdown.")] = "auto",
    mark: Annotated[
        str | None, typer.Option(help="Regular expression of what to align. Default: lines, blocks or records.")
    ] = None,
    offset: Annotated[
        int | None,
        typer.Option(help="Tokens that the model reads before the file. Default: its start-of-text only."),
    ] = None,
    unit: Annotated[
        str, typer.Option(help="Visible neutral text for plain text, where white space makes no tokens.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Where to write. Default: NAME.aligned.SUFFIX; with --undo: in place.")
    ] = None,
    take_back: Annotated[bool, typer.Option("--undo", help="FILE is an aligned file: give the original back.")] = False,
    json: opt.Json = None,
) -> None:
    """Insert the fewest neutral tokens, so that records start at strong phases and cross no boundary.

    White space or comments, by the format: code parses to the same tree, JSON has the same value, Markdown renders to
    the same page. NAME.align.json beside the result gives the original back (--undo). Exit code 2: usage.
    """
    if take_back:
        gone = undo(file, out or file)
        opt.console_for_people(json).print(f"{out or file}: the original, {gone:,} tokens shorter", markup=False)
        return
    basis = alignment_basis(target, stride, curve, tokenizer)
    text = read_text(file)
    form = format_of(file.name) if format == "auto" else format
    found = align_text(
        text, basis.tokenizer, basis.stride_tokens, basis.phase_accuracy,
        form=form, mark=mark, unit=unit, offset_tokens=offset,
    )  # fmt: skip
    place = out or aligned_path(file)
    if place.is_dir():
        raise IsophaseError(f"--out {str(place)!r} is a folder.", "Give a file.")
    write_aligned(place, text, found, form, basis.stride_tokens)
    _print(found, place, basis.stride_tokens, json)


def _print(found: AlignedText, place: Path, stride: int, json: Path | None) -> None:
    figures = {name: value for name, value in asdict(found).items() if name not in ("text", "edits")}
    opt.write_json(json_format.dumps({"out": str(place), "stride_tokens": stride, **figures}, indent=2) + "\n", json)
    share = 100 * found.added_tokens / max(1, found.tokens_before)
    console = opt.console_for_people(json)
    for line in (
        f"{place}: {found.added_tokens:,} tokens added to {found.tokens_before:,} ({share:.1f} %), stride {stride}",
        f"not at a strong phase: {found.misplaced:,} of {found.spans:,} spans, before {found.misplaced_before:,}",
        f"across a boundary: {found.straddling:,}, before {found.straddling_before:,}",
    ):
        console.print(line, markup=False, soft_wrap=True)
