"""Late chunking: a document is read once, and chunks are means of its token vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.retrieval.late.adapters import ChonkieChunker
    from isophase.retrieval.late.allocation import keep_memory_steady
    from isophase.retrieval.late.chunker import Chunk, LateChunker
    from isophase.retrieval.late.encoder import Encoder
    from isophase.retrieval.late.rules import Delimiters, Sentences, TextRule, parse_rule

__all__ = [
    "ChonkieChunker",
    "Chunk",
    "Delimiters",
    "Encoder",
    "LateChunker",
    "Sentences",
    "TextRule",
    "keep_memory_steady",
    "parse_rule",
]

__getattr__, __dir__ = lazily(__name__, __file__)
