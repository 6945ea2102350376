"""A late chunker as chonkie's pipelines and users know chunkers, whether chonkie is installed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isophase.retrieval.late.chunker import Chunk, LateChunker
from isophase.retrieval.late.pooling import FloatArray


@dataclass(kw_only=True)
class PlainChunk:
    """A chunk with the fields that chonkie's own has."""

    text: str
    start_index: int
    end_index: int
    token_count: int
    embedding: FloatArray


class ChonkieChunker:
    """`chunk`, `chunk_batch` and calls as chonkie's chunkers have them, with embeddings filled in.

    Args:
        chunker: what cuts and embeds.

    Attributes:
        make: builds a chunk; chonkie's own `Chunk` where chonkie is installed, so that its refineries and handshakes
            take it.
    """

    def __init__(self, chunker: LateChunker) -> None:
        self.chunker = chunker
        self.make: Callable[..., Any] = PlainChunk
        try:
            from chonkie.types import Chunk as ChonkieChunk
        except ImportError:
            return
        self.make = ChonkieChunk

    def __call__(self, text: str | Sequence[str], show_progress: bool = False) -> list[Any]:
        """Chunks of a text, or a list of them for each text."""
        return self.chunk(text) if isinstance(text, str) else self.chunk_batch(text)

    def chunk(self, text: str) -> list[Any]:
        """Chunks of a text."""
        return self.chunk_batch([text])[0]

    def chunk_batch(self, texts: Sequence[str], show_progress: bool = False) -> list[list[Any]]:
        """Chunks of each text; all are batched together."""
        out: list[list[Any]] = [[] for _ in texts]
        for chunk in self.chunker.encode(texts):
            out[chunk.document].append(self._convert(chunk))
        return out

    def embed_query(self, text: str) -> FloatArray:
        """Vector of a question."""
        vector: FloatArray = self.chunker.encode_queries([text])[0]
        return vector

    def _convert(self, chunk: Chunk) -> Any:
        return self.make(
            text=chunk.text,
            start_index=chunk.start_char,
            end_index=chunk.end_char,
            token_count=chunk.end_token - chunk.start_token,
            embedding=chunk.vector,
        )
