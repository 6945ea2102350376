"""Questions to an index, and its rows as Parquet or NumPy.

Legend: D width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isophase.errors import IsophaseError
from isophase.retrieval.compare.metrics import Units, best_places
from isophase.retrieval.index.tables import COMPLETE, IndexSettings, IndexSummary, chunk_schema, read_settings
from isophase.retrieval.late.chunker import LateChunker
from isophase.retrieval.late.encoder import Encoder
from isophase.retrieval.late.pooling import FloatArray

_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A chunk that was found.

    Attributes:
        score: cosine with the question.
        path: of the document.
        start_char: first character.
        end_char: one past the last.
        start_token: first token.
        end_token: one past the last.
        text: of the chunk.
    """

    score: float
    path: str
    start_char: int
    end_char: int
    start_token: int
    end_token: int
    text: str


class Index:
    """A complete index, open for reading.

    Args:
        folder: that `isophase embed` wrote.

    Raises:
        IsophaseError: if it is no index, or not complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: IndexSettings = read_settings(folder)
        if not (folder / COMPLETE).is_file():
            raise IsophaseError(
                f"the index {str(folder)!r} is not complete.", "Repeat the `isophase embed` command that began it."
            )
        try:
            self.summary = IndexSummary.model_validate_json((folder / COMPLETE).read_bytes())
            self._chunks: Any = lancedb.connect(folder).open_table("chunks")
        except (OSError, ValueError, RuntimeError) as error:
            raise IsophaseError(
                f"the index {str(folder)!r} is damaged ({type(error).__name__}).", "Embed into another --out."
            ) from error

    def chunker(self, model: str | None = None) -> LateChunker:
        """The model that the index was made with, to embed questions.

        Args:
            model: where it is now; default where it was.

        Raises:
            IsophaseError: if it cannot be loaded, or is another model.
        """
        then = self.settings
        encoder = Encoder(
            model or then.model,
            window_tokens=then.window_tokens,
            dtype=then.dtype,
            document_prompt=then.document_prompt,
            query_prompt=then.query_prompt,
        )
        if encoder.fingerprint() != then.fingerprint:
            raise IsophaseError(
                f"{encoder.name!r} is not the model that {str(self.folder)!r} was made with.",
                "Give it with --model, or embed again.",
            )
        return LateChunker(encoder, mode="whole", overlap_tokens=then.overlap_tokens)

    def search(self, vector_D: FloatArray, top: int = 5) -> list[Hit]:
        """The best chunks for a question, best first, by exact comparison with every chunk.

        In an index of several grids the best offset wins: what overlaps a better chunk is left out.

        Args:
            vector_D: of the question.
            top: how many.
        """
        grids = self.settings.offsets
        wanted = top * (4 * grids if grids > 1 else 1)
        while True:
            rows = self._chunks.search(vector_D).distance_type("cosine").limit(wanted).to_arrow().to_pylist()
            # Equal distances in the order of the documents, so that answers do not depend on how rows are stored.
            rows.sort(key=lambda row: (row["_distance"], row["document"], row["shift_tokens"], row["chunk"]))
            hits = _best(rows, top, grids > 1)
            if len(hits) == top or len(rows) < wanted:
                return hits
            wanted *= 4

    def rows(self) -> Iterator[pa.Table]:
        """All chunks with their vectors, in order of document, grid and chunk, some documents at a time."""
        order = [(name, "ascending") for name in ("document", "shift_tokens", "chunk")]
        for first in range(0, self.settings.documents, _DOCUMENTS_AT_ONCE):
            where = f"document >= {first} and document < {first + _DOCUMENTS_AT_ONCE}"
            found = self._chunks.search().where(where).limit(self.summary.chunks + 1).to_arrow()
            yield found.select(chunk_schema(self.settings.width).names).sort_by(order)

    def export(self, path: Path) -> int:
        """Write all rows to a file; nothing is half written.

        Args:
            path: `.parquet` for all columns, `.npz` for vectors and places without texts.

        Returns:
            Number of rows.

        Raises:
            IsophaseError: for another ending, or a file that cannot be written.
        """
        writers = {".parquet": self._write_parquet, ".npz": self._write_numpy}
        write = writers.get(path.suffix)
        if write is None:
            raise IsophaseError(f"cannot export to {str(path)!r}.", "Give a name that ends in .parquet or .npz.")
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise IsophaseError(
                f"cannot write {str(path)!r}: {error.strerror or error}.", "Choose another file."
            ) from error
        return self.summary.chunks

    def _write_parquet(self, path: Path) -> None:
        with pq.ParquetWriter(path, chunk_schema(self.settings.width)) as writer:
            for table in self.rows():
                if table.num_rows:
                    writer.write_table(table)

    def _write_numpy(self, path: Path) -> None:
        table = pa.concat_tables([chunk_schema(self.settings.width).empty_table(), *self.rows()])
        vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, self.settings.width)
        numbers = {name: table[name].to_numpy() for name in table.schema.names[:7]}
        paths = np.array(table["path"].to_pylist(), dtype=np.str_)
        with path.open("wb") as file:
            np.savez(file, vectors=vectors, path=paths, **numbers)


def render_json(hits: Sequence[Hit]) -> str:
    """Hits as JSON: two spaces of indent, one final newline."""
    return json.dumps([asdict(hit) for hit in hits], ensure_ascii=False, indent=2) + "\n"


def _best(rows: list[dict[str, Any]], top: int, many: bool) -> list[Hit]:
    def column(name: str) -> Any:
        return np.array([row[name] for row in rows], dtype=np.int64)

    units = Units(
        document_N=column("document"),
        start_N=column("start_char"),
        end_N=column("end_char"),
        grid_N=column("shift_tokens"),
        vectors_ND=np.zeros((len(rows), 0), dtype=np.float32),
    )
    scores = 1 - np.array([row["_distance"] for row in rows], dtype=np.float64)
    kept = best_places(units, scores, top, many)
    names = ("path", "start_char", "end_char", "start_token", "end_token", "text")
    return [Hit(score=float(scores[n]), **{name: rows[n][name] for name in names}) for n in kept]
