"""`isophase needle`: a fact in a long text, for several cache methods."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isophase.cli import options as opt
from isophase.errors import IsophaseError
from isophase.probes import PROSE


def needle(
    model: Annotated[str, typer.Argument(help="hf:PATH_OR_ID.", show_default=False)],
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="Method: full, streaming, snapkv, chunkkv, voted, dynamic or merged with settings, such as "
            "'chunkkv(budget=128)'. Repeat it to compare. Default: full and three at 128 entries.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens per prompt: FIRST:LAST:STEP, or numbers with commas.")] = "1000",
    depths: Annotated[int, typer.Option(help="Places along the prompt.", min=1, max=1000)] = 5,
    phases: Annotated[
        int, typer.Option(help="Neighbouring positions at each depth; the chunk length to see its phases.", min=2)
    ] = 10,
    haystack: Annotated[
        Path | None, typer.Option(help="Text file around the needle, repeated where it ends. Default: built-in prose.")
    ] = None,
    seed: opt.Seed = 0,
    margin: opt.Margin = 0.02,
    gguf: opt.Gguf = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Repeating a command resumes its run. Default: isophase-needle/NAME."),
    ] = None,
    json: opt.Json = None,
) -> None:
    """Does a model still find a fact in a long text when its cache is compressed?

    Every prompt is read once and answered with each method. Right means the whole five-digit code.
    """
    from isophase.needle import parse_lengths

    read = opt.hugging_face_model(model, use="whose cache can be compressed")
    sizes = parse_lengths(lengths)
    if not 0 < margin < 0.5:
        raise IsophaseError(f"--margin is {margin}; it must lie between 0 and 0.5.", "The usual one is 0.02.")
    text = _read(haystack)
    try:
        from isophase.needle import (
            NeedleTask,
            render_json,
            results_table,
            run_needle,
            settings_for,
            summarise,
            write_report,
        )
        from isophase.targets import HuggingFaceTarget
    except ImportError as error:
        raise IsophaseError(
            f"needles need torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    default = ("full", "snapkv(budget=128, window_tokens=16)", "chunkkv(budget=128)", "dynamic(budget=128)")
    target = HuggingFaceTarget(read.place, gguf_file=gguf)
    digest = sha256(text.encode()).hexdigest()[:12]
    settings = settings_for(target, tuple(cache or default), sizes, depths, phases, seed, digest)
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in model.rstrip("/").split("/")[-1])[:40]
    key = sha256(settings.model_dump_json().encode()).hexdigest()[:8]
    folder = out or Path("isophase-needle") / f"{name}-{key}"
    progress = Console(stderr=True)
    with progress.status("asking") as status:
        answers = run_needle(
            target, settings, text, folder,
            lambda done, total, seconds: status.update(f"asking {done} of {total}, {seconds:.1f} s each"),
        )  # fmt: skip
    result = summarise(settings, answers, NeedleTask(settings, target.tokenizer, text).span_tokens, margin)
    page = write_report(result, folder)
    opt.write_json(render_json(result), json)
    console = opt.console_for_people(json)
    console.print(results_table(result), markup=False)
    console.print(f"Report: {page}", soft_wrap=True, markup=False)


def _read(path: Path | None) -> str:
    """The haystack.

    Raises:
        IsophaseError: if the file cannot be read as text.
    """
    if path is None:
        return PROSE
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IsophaseError(
            f"cannot read the haystack {str(path)!r} ({type(error).__name__}).", "Give a text file in UTF-8."
        ) from error
