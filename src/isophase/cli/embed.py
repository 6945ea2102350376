"""`isophase embed`: documents into an index; `embed compare` and `embed export` beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isophase.cli import options as opt
from isophase.errors import IsophaseError

if TYPE_CHECKING:
    from isophase.retrieval.compare import Comparison, Estimate
    from isophase.retrieval.late import LateChunker

_DEFAULT = "index"

Docs = Annotated[
    list[Path], typer.Argument(help="Text files in UTF-8, and folders of them (hidden files are left out).")
]
Model = Annotated[
    str,
    typer.Option(help="Folder or hub id of a mean-pooling model, of sentence-transformers or for AutoModel."),
]
Window = Annotated[int | None, typer.Option(help="Tokens that the model reads at once. Default: as the model says.")]
Overlap = Annotated[
    int | None,
    typer.Option(help="Tokens that the next window reads again. Default: a sixteenth, at most 128."),
]
Batch = Annotated[
    int | None, typer.Option(help="Most tokens of one forward pass. Default: as suits the device.", min=1)
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or another torch device. Default: CUDA where there is one.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. Default: float32.")]
DocumentPrompt = Annotated[
    str | None, typer.Option(help="Text before every window, such as 'passage: '. Default: as the model says.")
]
QueryPrompt = Annotated[
    str | None, typer.Option(help="Text before every question, such as 'query: '. Default: as the model says.")
]
Weight = Annotated[float, typer.Option(help="Weight of late vectors when blending, 0 to 1.")]


class _EmbedGroup(typer.core.TyperGroup):
    """`embed DOCS...` without a command of its own name; a file called `compare` is `./compare`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        named = bool(args) and args[0] in self.commands
        name = args[0] if named else _DEFAULT
        rest = args[1:] if named else args
        shown = info_name if name == _DEFAULT else f"{info_name} {name}"
        return self.commands[name].make_context(shown, rest, parent, **extra)


embed = typer.Typer(
    cls=_EmbedGroup,
    help="Embed documents, cut by any chunk rule, into an index; compare kinds of vectors; export.",
    rich_markup_mode=None,
)


@embed.command(_DEFAULT)
def index(
    docs: Docs,
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder of the index. Repeating a command resumes it.")],
    rule: Annotated[
        str,
        typer.Option(help="fixed(128), sentences(64), delimiters(128) or local-max(32): longest chunk, or radius."),
    ] = "sentences(128)",
    mode: Annotated[
        str,
        typer.Option(
            help="late: chunks that have read the document; naive: chunks read alone; blended: both, at two readings; "
            "whole: one vector a document."
        ),
    ] = "blended",
    late_weight: Weight = 0.5,
    offsets: Annotated[
        int, typer.Option(help="Grids of a fixed rule, equally spaced; their vectors are averaged.", min=1)
    ] = 1,
    window: Window = None,
    overlap: Overlap = None,
    batch: Batch = None,
    device: Device = None,
    dtype: Dtype = None,
    document_prompt: DocumentPrompt = None,
    query_prompt: QueryPrompt = None,
) -> None:
    """Embed documents into an index (LanceDB), resumable, with exact spans.

    Files that are no text are named, skipped and counted.

    Beside it: isophase embed compare --help, isophase embed export --help.
    """
    _need()
    from isophase.retrieval.index import build_index, list_files
    from isophase.retrieval.late import keep_memory_steady

    keep_memory_steady()
    files = list_files(docs)
    chunker = _chunker(
        model, rule, mode, late_weight, offsets, overlap,
        window_tokens=window, batch_tokens=batch, device=device, dtype=dtype,
        document_prompt=document_prompt, query_prompt=query_prompt,
    )  # fmt: skip
    progress = Console(stderr=True)
    with progress.status("reading") as status:
        summary = build_index(
            out, chunker, rule, files, lambda done, total: status.update(f"embedding {done:,} of {total:,} files")
        )
    _name_skipped(summary.skipped)
    console = Console(highlight=False)
    console.print(
        f"{summary.documents:,} documents, {summary.chunks:,} vectors; {len(summary.skipped):,} files skipped.\n"
        f"Index: {out}",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    if not summary.documents:
        raise IsophaseError(f"none of the {len(files)} files is a text document.", "Give text files in UTF-8.")


@embed.command("export")
def export(
    folder: Annotated[Path, typer.Argument(help="Index.", metavar="INDEX")],
    file: Annotated[Path, typer.Argument(help="NAME.parquet (all columns) or NAME.npz (vectors and places).")],
) -> None:
    """Write an index as Parquet or NumPy."""
    _need()
    from isophase.retrieval.index import Index

    rows = Index(folder).export(file)
    Console(highlight=False).print(f"{rows:,} rows: {file}", soft_wrap=True, markup=False)


@embed.command("compare")
def compare(
    docs: Docs,
    queries: Annotated[
        Path,
        typer.Option(
            help='JSON lines {"query": ..., "document": PATH, "answer": its text in the document, or left out}.'
        ),
    ],
    model: Model,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Chunk rule; repeat it. Default: fixed(128) and sentences(128).", show_default=False),
    ] = None,
    late_weight: Weight = 0.5,
    offsets: Annotated[int, typer.Option(help="Grids of a fixed rule that are tried together.", min=1)] = 4,
    window: Window = None,
    overlap: Overlap = None,
    batch: Batch = None,
    device: Device = None,
    dtype: Dtype = None,
    document_prompt: DocumentPrompt = None,
    query_prompt: QueryPrompt = None,
    json: opt.Json = None,
) -> None:
    """Which vectors find the answers in your own documents, with intervals, and which to use."""
    _need()
    from isophase.retrieval.compare import compare_rules, read_questions
    from isophase.retrieval.index import list_files, read_document

    read = [read_document(path) for path in list_files(docs)]
    _name_skipped([(d.path, d.skipped) for d in read if d.skipped])
    texts = [d for d in read if not d.skipped]
    questions = read_questions(queries, texts)
    chunker = _chunker(
        model, "sentences", "late", late_weight, 1, overlap,
        window_tokens=window, batch_tokens=batch, device=device, dtype=dtype,
        document_prompt=document_prompt, query_prompt=query_prompt,
    )  # fmt: skip
    progress = Console(stderr=True)
    with progress.status("reading") as status:
        result = compare_rules(
            chunker, texts, questions, rule or ["fixed(128)", "sentences(128)"],
            late_weight=late_weight, offsets=offsets,
            say=lambda name, done: status.update(f"{escape(name)}: {done:,} of {len(texts):,} documents"),
        )  # fmt: skip
    opt.write_json(result.model_dump_json(indent=2) + "\n", json)
    console = opt.console_for_people(json)
    for part in result.rules:
        console.print(_table(part))
        console.print(f"{part.rule}: {part.advice}\n", soft_wrap=True, markup=False)


def _need() -> None:
    """Say what is missing, in one line."""
    try:
        import lancedb  # noqa: F401

        import isophase.retrieval  # noqa: F401
    except ImportError as error:
        raise IsophaseError(
            f"embedding needs torch, transformers and lancedb, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[retrieval]'.",
        ) from error


def _chunker(
    model: str, rule: str, mode: str, late_weight: float, offsets: int, overlap: int | None, **options: Any
) -> LateChunker:
    from isophase.retrieval.late import LateChunker, parse_rule

    return LateChunker(
        model, rule=parse_rule(rule), mode=mode, late_weight=late_weight, offsets=offsets, overlap_tokens=overlap,
        **options,
    )  # fmt: skip


def _name_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for path, reason in skipped:
        console.print(f"skipped {path!r}: {reason}", markup=False)


def _table(part: Comparison) -> Table:
    """Methods, one a line."""
    out = Table(title=f"{part.rule}: {part.questions} questions", box=None, pad_edge=False, header_style="bold")
    out.add_column("vectors")
    for heading in ("rows", "chunk nDCG@10", "recall@10", "document nDCG@10", "recall@10", "minus naive"):
        out.add_column(heading, justify="right")
    for m in part.methods:
        out.add_row(
            m.method, f"{m.vectors:,}", *(_shown(v) for v in (m.chunk_ndcg, m.chunk_recall)),
            *(_shown(v) for v in (m.document_ndcg, m.document_recall)), _shown(m.difference, signed=True),
        )  # fmt: skip
    return out


def _shown(value: Estimate | None, signed: bool = False) -> str:
    if value is None:
        return "–"
    sign = "+" if signed else ""
    return f"{value.mean:{sign}.3f} ({value.low:{sign}.3f} to {value.high:{sign}.3f})"
