"""An index on disk: two tables of LanceDB, settings before them and a summary behind.

`documents` has one row for every file, those that were skipped too; `chunks` one for every chunk. A group of documents
is committed as a whole, its chunks first, so that a killed run loses at most the group that it was reading.

Legend: D width.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lancedb
import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from isophase import __version__
from isophase.atomic import write_atomically
from isophase.errors import IsophaseError
from isophase.retrieval.index.documents import Document, read_document
from isophase.retrieval.late.chunker import Chunk, LateChunker, groups

SETTINGS, COMPLETE, LOCK = "index.json", "complete.json", ".lock"
SCHEMA_VERSION = 2
DOCUMENTS = pa.schema(
    [
        ("document", pa.int64()), ("path", pa.string()), ("digest", pa.string()), ("size_bytes", pa.int64()),
        ("chunks", pa.int64()), ("skipped", pa.string()),
    ]
)  # fmt: skip


class IndexSettings(BaseModel):
    """Everything that an index depends on.

    Attributes:
        schema_version: of this layout.
        model: folder or hub id.
        fingerprint: of the model.
        rule: chunk rule, as written.
        mode: `late`, `naive`, `whole` or `blended`.
        late_weight: of late vectors when blended.
        offsets: grids of a fixed stride.
        window_tokens: of one window of the model.
        overlap_tokens: between windows.
        dtype: precision of the model.
        document_prompt: before every window.
        query_prompt: before every question.
        width: D.
        documents: number of files.
        paths: digest of their paths, in order.
        isophase: version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    rule: str
    mode: str
    late_weight: float
    offsets: int
    window_tokens: int
    overlap_tokens: int
    dtype: str
    document_prompt: str
    query_prompt: str
    width: int
    documents: int
    paths: str
    isophase: str

    @classmethod
    def of(cls, chunker: LateChunker, rule: str, files: Sequence[Path]) -> Self:
        """Settings of an index that a chunker makes of files."""
        encoder = chunker.encoder
        local = Path(encoder.name).expanduser()
        return cls(
            model=str(local.resolve()) if local.is_dir() else encoder.name,
            fingerprint=encoder.fingerprint(),
            rule="whole" if chunker.mode == "whole" else rule,
            mode=chunker.mode,
            late_weight=chunker.late_weight,
            offsets=len(chunker.rules),
            window_tokens=encoder.window_tokens,
            overlap_tokens=chunker.overlap_tokens,
            dtype=encoder.dtype,
            document_prompt=encoder.documents.prompt,
            query_prompt=encoder.queries.prompt,
            width=encoder.width,
            documents=len(files),
            paths=sha256("\0".join(map(str, files)).encode(errors="surrogateescape")).hexdigest()[:16],
            isophase=__version__,
        )


class IndexSummary(BaseModel):
    """What a complete index holds.

    Attributes:
        documents: files that were read.
        chunks: rows of the index.
        skipped: path and reason of files that are no documents.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    chunks: int
    skipped: tuple[tuple[str, str], ...]


class IndexWriter:
    """An index folder open for writing; one process at a time.

    Args:
        folder: created if missing; must be empty or hold an index of the same settings.
        settings: of the index.

    Raises:
        IsophaseError: if the folder cannot be written, holds something else, or is in use.
    """

    def __init__(self, folder: Path, settings: IndexSettings) -> None:
        self.folder, self.settings = folder, settings
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._claim()
        except BlockingIOError as error:
            os.close(self._lock)
            raise IsophaseError(f"{str(folder)!r} is being written by another process.", "Wait for it.") from error
        except BaseException:
            os.close(self._lock)
            raise
        with _store(folder):
            database = lancedb.connect(folder)
            self._documents = _table(database, "documents", DOCUMENTS)
            # Without a row here the chunks of a group do not count, and are written again.
            self.done = self._documents.count_rows()
            self._chunks = _table(database, "chunks", chunk_schema(settings.width))
            if self._chunks.count_rows(f"document >= {self.done}"):
                self._chunks.delete(f"document >= {self.done}")

    def _claim(self) -> None:
        try:
            if (self.folder / SETTINGS).exists():
                then, now = read_settings(self.folder).model_dump(), self.settings.model_dump()
                if different := next((name for name in now if then[name] != now[name]), None):
                    raise IsophaseError(
                        f"{str(self.folder)!r} holds an index with other settings ({different} is {then[different]!r} "
                        f"there and {now[different]!r} here).",
                        "Choose another --out, or repeat the command that began it to resume.",
                    )
            elif strange := sorted(p.name for p in self.folder.iterdir() if not p.name.startswith(".")):
                raise IsophaseError(
                    f"{str(self.folder)!r} is not empty and not an index (it holds {strange[0]!r}).",
                    "Choose another --out.",
                )
            else:
                write_atomically(self.folder / SETTINGS, self.settings.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def known(self) -> list[tuple[str, str]]:
        """Path and digest of every document that is done, in order."""
        with _store(self.folder):
            rows = self._documents.to_arrow().sort_by("document").select(["path", "digest"]).to_pylist()
        return [(row["path"], row["digest"]) for row in rows]

    def add(self, documents: Sequence[Document], chunks: Sequence[Chunk]) -> None:
        """Commit the next group of documents: its chunks, then itself."""
        first = self.done
        counts = [0] * len(documents)
        for chunk in chunks:
            counts[chunk.document - first] += 1
        rows = [
            {
                "document": first + n, "path": d.path, "digest": d.digest, "size_bytes": d.size_bytes,
                "chunks": counts[n], "skipped": d.skipped or ("" if counts[n] else "has no tokens"),
            }
            for n, d in enumerate(documents)
        ]  # fmt: skip
        with _store(self.folder):
            if chunks:
                self._chunks.add(chunk_table(chunks, [d.path for d in documents], first, self.settings.width))
            self._documents.add(pa.Table.from_pylist(rows, schema=DOCUMENTS))
        self.done += len(documents)

    def finish(self) -> IndexSummary:
        """Compact the tables, and say that the index is complete."""
        with _store(self.folder):
            for table in (self._chunks, self._documents):
                table.optimize(cleanup_older_than=timedelta(milliseconds=1), delete_unverified=True)
            rows = self._documents.to_arrow().sort_by("document").to_pylist()
            summary = IndexSummary(
                documents=sum(not row["skipped"] for row in rows),
                chunks=self._chunks.count_rows(),
                skipped=tuple((row["path"], row["skipped"]) for row in rows if row["skipped"]),
            )
        try:
            write_atomically(self.folder / COMPLETE, summary.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return summary


def build_index(
    folder: Path,
    chunker: LateChunker,
    rule: str,
    files: Sequence[Path],
    say: Callable[[int, int], None] | None = None,
) -> IndexSummary:
    """Embed files into an index, or go on where a killed run stopped.

    Args:
        folder: of the index.
        chunker: what cuts and embeds.
        rule: its rule, as written.
        files: documents.
        say: called with files done and files in all.

    Returns:
        What the index holds.

    Raises:
        IsophaseError: for a folder that cannot be used, or a file that changed since it was read.
    """
    with IndexWriter(folder, IndexSettings.of(chunker, rule, files)) as writer:
        for path, (_, digest) in zip(files, writer.known(), strict=False):
            if read_document(path).digest != digest:
                raise IsophaseError(
                    f"{str(path)!r} has changed since it was read into {str(folder)!r}.",
                    "Choose another --out, so that the index shows one state of all documents.",
                )
        rest = (read_document(path) for path in files[writer.done :])
        for group in groups(rest, lambda document: len(document.text)):
            writer.add(group, chunker.encode_group([document.text for document in group], writer.done))
            if say is not None:
                say(writer.done, len(files))
        return writer.finish()


def read_settings(folder: Path) -> IndexSettings:
    """Settings of an index.

    Raises:
        IsophaseError: if the folder is no index, damaged, or of a newer schema.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise IsophaseError(
            f"{str(folder)!r} is not an index: it has no {SETTINGS}.", "Give the --out of `isophase embed`."
        )
    try:
        return IndexSettings.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IsophaseError(
            f"{str(path)!r} cannot be read ({type(error).__name__}).",
            "Embed into another --out; an index of a newer isophase needs that isophase.",
        ) from error


def chunk_schema(width: int) -> pa.Schema:
    """Columns of the table `chunks`."""
    numbers = ("document", "chunk", "shift_tokens", "start_char", "end_char", "start_token", "end_token")
    return pa.schema(
        [
            *((name, pa.int64()) for name in numbers),
            ("path", pa.string()),
            ("text", pa.string()),
            ("vector", pa.list_(pa.float32(), width)),
        ]
    )


def chunk_table(chunks: Sequence[Chunk], paths: Sequence[str], first: int, width: int) -> pa.Table:
    """Chunks of documents `first` and on as rows."""
    schema = chunk_schema(width)
    flat = np.stack([chunk.vector for chunk in chunks]).astype(np.float32).ravel()
    columns: list[Any] = [[getattr(chunk, name) for chunk in chunks] for name in schema.names[:7]]
    columns.append([paths[chunk.document - first] for chunk in chunks])
    columns.append([chunk.text for chunk in chunks])
    arrays = [pa.array(column, type=schema.field(n).type) for n, column in enumerate(columns)]
    return pa.Table.from_arrays(
        [*arrays, pa.FixedSizeListArray.from_arrays(pa.array(flat), width)], schema=schema
    )  # fmt: skip


def _table(database: Any, name: str, schema: pa.Schema) -> Any:
    try:
        return database.open_table(name)
    except ValueError:
        pass
    try:
        return database.create_table(name, schema=schema)
    except ValueError:
        # Killed before its first commit: nothing in it counts.
        return database.create_table(name, schema=schema, mode="overwrite")


@contextmanager
def _store(folder: Path) -> Iterator[None]:
    """Turn what LanceDB raises into one line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: Exception) -> IsophaseError:
    reason = str(getattr(error, "strerror", None) or error)
    if "No space left" in reason or "os error 28" in reason:
        return IsophaseError(f"the disk of {str(folder)!r} is full.", "Free some space and repeat the command.")
    return IsophaseError(f"cannot use {str(folder)!r}: {' '.join(reason.split())[:300]}.", "Choose another --out.")
