"""`isophase search`: a question to an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isophase.cli import options as opt
from isophase.errors import IsophaseError


def search(
    index: Annotated[Path, typer.Argument(help="Folder that `isophase embed` wrote.")],
    question: Annotated[str, typer.Argument(help="What to look for.")],
    top: Annotated[int, typer.Option("-k", "--top", help="How many chunks.", min=1, max=1000)] = 5,
    model: Annotated[
        str | None, typer.Option(help="Where the index's model is now. Default: where it was.", show_default=False)
    ] = None,
    json: opt.Json = None,
) -> None:
    """The chunks of an index that answer a question best."""
    try:
        import lancedb  # noqa: F401

        from isophase.retrieval.index import Index, render_json
    except ImportError as error:
        raise IsophaseError(
            f"searching needs torch, transformers and lancedb, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[retrieval]'.",
        ) from error
    opened = Index(index)
    hits = opened.search(opened.chunker(model).encode_queries([question])[0], top)
    opt.write_json(render_json(hits), json)
    console = opt.console_for_people(json)
    for n, hit in enumerate(hits, start=1):
        console.print(
            f"{n}. {hit.score:.3f}  {hit.path}  characters {hit.start_char} to {hit.end_char}",
            style="bold", soft_wrap=True, markup=False,
        )  # fmt: skip
        console.print(hit.text.strip() + "\n", soft_wrap=True, markup=False)
