"""`isophase prefill search` and `isophase prefill show`: patterns of sparse attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from isophase.atomic import write_atomically
from isophase.cli import options as opt
from isophase.errors import IsophaseError

prefill = typer.Typer(help="Sparse attention over long prompts: search patterns, look at them.", no_args_is_help=True)

Tokens = Annotated[int, typer.Option(help="Tokens of the text to read: as many as the prompts have.", min=512)]
Budget = Annotated[float, typer.Option(help="Keys that may be read, by those of dense attention, mean over heads.")]


@prefill.command("search")
def search(
    model: Annotated[str, typer.Argument(help="hf:PATH_OR_ID.", show_default=False)],
    text: Annotated[Path, typer.Option("--text", help="Text file in UTF-8; long enough.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Where the patterns are written.")] = Path("patterns.json"),
    tokens: Tokens = 4096,
    budget: Budget = 0.25,
    seed: opt.Seed = 0,
    gguf: opt.Gguf = None,
) -> None:
    """Search pattern and size for every layer and head: as much attention as possible within a budget of keys."""
    place = opt.hugging_face_model(model, use="that can be read sparsely").place
    words = _read(text)
    if not out.resolve().parent.is_dir():
        raise IsophaseError(f"the folder of {str(out)!r} does not exist.", "Choose another --out.")
    try:
        from isophase.prefill.choose import search_text
        from isophase.targets import HuggingFaceTarget
    except ImportError as error:
        raise _needs_torch(error) from error
    console = Console(stderr=True)
    with console.status("reading"):
        reader = HuggingFaceTarget(place, gguf_file=gguf)
        found = search_text(reader, words, tokens, budget=budget, seed=seed, name=place)
    opt.write_json(found.model_dump_json(indent=1) + "\n", out)
    print(f"recall {found.recall():.3f} of attention with {found.density():.3f} of the keys, on {found.tokens} tokens")
    print(f"Patterns: {out}")


@prefill.command("show")
def show(
    result: Annotated[Path, typer.Argument(help="Patterns, or a saved run.", show_default=False)],
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Picture to write. Default: beside the file, with the ending .svg.")
    ] = None,
) -> None:
    """Patterns, densities and recall of every head, as a table and a picture."""
    try:
        from isophase.prefill import draw_densities, head_facts, read_result, summary
    except ImportError as error:
        raise _needs_torch(error) from error
    read = read_result(result)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("layer", "head", "pattern", "density", "recall"):
        table.add_column(heading, justify="left" if heading == "pattern" else "right")
    for fact in head_facts(read):
        recall = "" if fact.recall is None else f"{fact.recall:.3f}"
        table.add_row(str(fact.layer), str(fact.head), fact.pattern, f"{fact.density:.3f}", recall)
    console = Console(highlight=False)
    console.print(table)
    for line in summary(read):
        console.print(line, markup=False, soft_wrap=True)
    where = svg or result.with_suffix(".svg")
    try:
        picture = draw_densities(read, title=result.name)
        write_atomically(where.resolve(), picture)
    except ValueError as error:
        console.print(f"No picture: {error}.", markup=False, soft_wrap=True)
        return
    except OSError as error:
        raise IsophaseError(f"cannot write {str(where)!r}: {error.strerror}.", "Choose another --svg file.") from error
    console.print(f"Picture: {where}", markup=False, soft_wrap=True)


def _needs_torch(error: ImportError) -> IsophaseError:
    return IsophaseError(
        f"sparse prefill needs torch and transformers, and {error.name} is not installed.",
        "Install them with: pip install 'isophase[torch]'.",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IsophaseError(
            f"cannot read the text {str(path)!r} ({type(error).__name__}).", "Give a text file in UTF-8."
        ) from error
