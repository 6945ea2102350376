"""Options that several commands share, and what turns them into settings."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isophase.atomic import write_atomically
from isophase.audit import AuditSettings, OpenTarget, Plan, Report, write_error
from isophase.audit.report import write_report
from isophase.errors import IsophaseError
from isophase.mitigate import can_vote, open_target, vote_suffix
from isophase.probes import PROBE_NAMES, STYLES
from isophase.specs import Spec, read_spec
from isophase.targets import SERVER_CHOICES, ServerOptions, Target

DEFAULT_TARGETS = ("isophase:w8s8", "isophase:w4s4", "isophase:keys8", "isophase:hash4")

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="isophase:NAME, hf:PATH_OR_ID, http://HOST:PORT/v1#MODEL or planted:SETTINGS; several in one run.",
        show_default=False,
    ),
]
Control = Annotated[
    str | None,
    typer.Option(
        help="Model to compare with, or none. Default: for bundled models, their full-attention twin; else none."
    ),
]
ProbeOption = Annotated[
    str, typer.Option(help="records, prefix, in-sequence, completion, or all; several with commas.")
]
Stride = Annotated[str, typer.Option(help="auto (configuration, else scan), scan, or a number of tokens.")]
Items = Annotated[
    int | None,
    typer.Option(help="Sets of records with one question; each is asked at every position of its window."),
]
Records = Annotated[int | None, typer.Option(help="Records per prompt; without it a pilot picks the difficulty.")]
Length = Annotated[int | None, typer.Option(help="Tokens per prompt.")]
Window = Annotated[
    int | None,
    typer.Option(help="Neighbouring positions that each item is asked at; the longest period that can be found."),
]
Seed = Annotated[int, typer.Option(help="Decides prompts and their order.")]
Demonstrations = Annotated[
    int | None,
    typer.Option(help="Answered questions before the question; 2 for pretrained models, 0 for the bundled ones."),
]
KeyTokens = Annotated[int, typer.Option(help="Tokens per key.")]
ValueTokens = Annotated[int, typer.Option(help="Tokens per value.")]
Style = Annotated[str, typer.Option(help=f"How prompts are written: auto, {', '.join(STYLES)}.")]
Margin = Annotated[float, typer.Option(help="Amplitude (0..0.5) below which an effect does not matter.")]
Server = Annotated[str, typer.Option(help=f"Kind of a server: {', '.join(SERVER_CHOICES)}.")]
Concurrency = Annotated[int, typer.Option(help="Most requests in flight to a server.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Tokenizer of a server's model: tokenizer.json, a folder with one, or a hub id. Default: as it says.",
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds that one request to a server may take.")]
Cache = Annotated[
    list[str] | None,
    typer.Option(
        "--cache",
        help="Let hf: targets answer from a compressed cache: full, streaming, snapkv, chunkkv, voted, dynamic or "
        "merged with settings, such as 'chunkkv(budget=128)'. Repeat it to compare.",
        show_default=False,
    ),
]
Prefill = Annotated[
    list[str] | None,
    typer.Option(
        "--prefill",
        help="Let hf: targets read prompts sparsely: auto, a file of `isophase prefill search`, or a pattern such as "
        "'block_sparse(windows=16, overlap=1)'. Repeat it to compare.",
        show_default=False,
    ),
]
Vote = Annotated[
    list[str] | None,
    typer.Option(
        "--vote",
        help="Let models and servers answer by a vote: a number of shifts, or shifts such as 0,8,16; then maybe a "
        "rule: majority, confidence, mean-log-probability, mean-probability. Repeat it to compare; 1 is no vote.",
        show_default=False,
    ),
]
Gguf = Annotated[str | None, typer.Option(help="GGUF file inside an hf: folder.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Run folder. Repeating a command resumes its run. Default: isophase-runs/NAME."),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the result as JSON to this file; - for standard output."),
]


def with_variants(
    targets: list[str] | None, caches: list[str] | None, votes: list[str] | None, prefills: list[str] | None = None
) -> list[str] | None:
    """Every target once for each cache method, vote or prefill that it can have, in its place; others as they are.

    Raises:
        IsophaseError: if one is asked for and no target can have it, or two kinds are asked for at once.
    """
    given = {"--cache": caches, "--vote": votes, "--prefill": prefills}
    if len(asked := [name for name, values in given.items() if values]) > 1:
        raise IsophaseError(f"{asked[0]} and {asked[1]} are given together.", "Measure them one at a time.")
    if not asked:
        return targets
    suffixes = [f"|{method}" for method in caches or []] + [f"|prefill({patterns})" for patterns in prefills or []]
    option, remedy = f"{'--cache compresses' if caches else '--prefill is for'} hf: targets", "Give hf:PATH_OR_ID."
    if votes:
        suffixes = ["" if vote.strip() == "1" else vote_suffix(vote) for vote in votes]
        option, remedy = "--vote asks models and servers", "Give isophase:NAME, hf:PATH_OR_ID or http://HOST:PORT/v1."
    takes_it = can_vote if votes else _is_plain_hf
    specs = [(spec, takes_it(spec)) for spec in targets or (DEFAULT_TARGETS if votes else ())]
    if not any(takes for _, takes in specs):
        raise IsophaseError(f"{option}, and none is given.", remedy)
    return [spec + suffix for spec, takes in specs for suffix in (suffixes if takes else [""])]


def _is_plain_hf(spec: str) -> bool:
    read = read_spec(spec)
    return read.kind == "hf" and not read.calls


def hugging_face_model(spec: str, *, use: str) -> Spec:
    """The spec of a Hugging Face model as it is, for commands that change how it reads or remembers.

    Args:
        spec: as the user gave it.
        use: what for, in the message.

    Raises:
        IsophaseError: if it is anything else.
    """
    problem = IsophaseError(f"{spec!r} is not a model {use}.", "Give hf:PATH_OR_ID.")
    try:
        read = read_spec(spec, what="model", places="hf:PATH_OR_ID")
    except IsophaseError:
        raise problem from None
    if read.kind != "hf" or read.calls:
        raise problem
    return read


def audit_settings(
    targets: list[str] | None,
    control: str | None,
    probe: str,
    stride: str,
    items: int | None,
    records: int | None,
    length: int | None,
    window: int | None,
    seed: int,
    demonstrations: int | None,
    key_tokens: int,
    value_tokens: int,
    style: str,
    margin: float,
    gguf: str | None,
    server: str = "auto",
    tokenizer: str | None = None,
) -> AuditSettings:
    """Settings from options.

    Raises:
        IsophaseError: for an option that is not one of its values.
    """
    chosen = tuple(targets or DEFAULT_TARGETS)
    if not targets and stride == "auto":
        # The bundled models are there to show that nobody has to tell the audit what to look for.
        stride = "scan"
    if stride not in ("auto", "scan") and not stride.isdecimal():
        raise IsophaseError(f"--stride is {stride!r}.", "Give auto, scan or a number of tokens.")
    names = PROBE_NAMES if probe == "all" else tuple(dict.fromkeys(probe.split(",")))
    unknown = [name for name in names if name not in PROBE_NAMES]
    if unknown:
        raise IsophaseError(f"--probe {unknown[0]!r} is unknown.", f"Give {', '.join(PROBE_NAMES)} or all.")
    if style != "auto" and style not in STYLES:
        raise IsophaseError(f"--style {style!r} is unknown.", f"Give auto, {', '.join(STYLES)}.")
    if len(set(chosen)) < len(chosen):
        raise IsophaseError("the same target is named twice.", "Name each target once.")
    return AuditSettings(
        targets=chosen,
        control=control,
        probes=names,
        stride=int(stride) if stride.isdecimal() else stride,
        items=items,
        records=records,
        length_tokens=length,
        window_tokens=window,
        seed=seed,
        demonstrations=demonstrations,
        key_tokens=key_tokens,
        value_tokens=value_tokens,
        style=style,
        margin=margin,
        gguf_file=gguf,
        server=server,
        tokenizer=tokenizer,
    )


def server_options(kind: str, tokenizer: str | None, concurrency: int, timeout: float) -> ServerOptions:
    """How servers among the targets are treated."""
    return ServerOptions(kind=kind, tokenizer=tokenizer, concurrency=concurrency, timeout_seconds=timeout)


def opener(gguf: str | None, server: ServerOptions | None = None) -> OpenTarget:
    """Opens targets, each once, so that a model is loaded once."""

    @cache
    def open_once(spec: str) -> Target:
        return open_target(spec, gguf_file=gguf if read_spec(spec).kind == "hf" else None, server=server)

    return open_once


def opener_of(plan: Plan) -> OpenTarget:
    """Opens the targets of a run for their tokenizers: no server is asked where its tokenizer is known."""
    known = {part.target: part.tokenizer for part in plan.parts}

    @cache
    def open_once(spec: str) -> Target:
        gguf = plan.settings.gguf_file if read_spec(spec).kind == "hf" else None
        tokenizer = known.get(spec) or plan.settings.tokenizer
        return open_target(spec, gguf_file=gguf, server=ServerOptions(kind=plan.settings.server, tokenizer=tokenizer))

    return open_once


def console_for_people(json: Path | None) -> Console:
    """Where text for people goes: standard output, unless the JSON takes it."""
    return Console(stderr=_is_stdout(json), highlight=False)


def save_report(result: Report, folder: Path) -> Path:
    """Write both report files; returns the page.

    Raises:
        IsophaseError: if they cannot be written; the answers are kept.
    """
    try:
        return write_report(result, folder)
    except OSError as error:
        raise write_error(folder, error) from error


def _is_stdout(where: Path | None) -> bool:
    return where is not None and str(where) == "-"


def write_json(text: str, where: Path | None) -> None:
    """Write JSON to a file, or to standard output for `-`; nowhere for None.

    Raises:
        IsophaseError: if the file cannot be written.
    """
    if where is None:
        return
    if _is_stdout(where):
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        if where.exists() and not where.is_file():
            # A device or a pipe, such as /dev/null: a rename would replace it.
            where.write_text(text, encoding="utf-8")
        else:
            write_atomically(where.resolve(), text)
    except OSError as error:
        raise IsophaseError(f"cannot write {str(where)!r}: {error.strerror}.", "Choose another --json file.") from error
