"""An index on disk: documents in, chunks out, questions to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.retrieval.index.documents import list_files, read_document
    from isophase.retrieval.index.search import Index, render_json
    from isophase.retrieval.index.tables import build_index

__all__ = ["Index", "build_index", "list_files", "read_document", "render_json"]

__getattr__, __dir__ = lazily(__name__, __file__)
