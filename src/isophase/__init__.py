"""Measure, explain and fix phase sensitivity in language models with chunked KV-cache compression.

What is typed most stands here; everything else is in the packages. Nothing is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.audit import build_report, compare_runs
    from isophase.cache import compress
    from isophase.lab.explain import explain
    from isophase.mitigate import open_target
    from isophase.mitigate.vote import PhaseVote
    from isophase.prefill import sparse_prefill
    from isophase.retrieval import Encoder, LateChunker

__version__ = "0.1.0"

__all__ = [
    "Encoder",
    "LateChunker",
    "PhaseVote",
    "build_report",
    "compare_runs",
    "compress",
    "explain",
    "open_target",
    "sparse_prefill",
]

__getattr__, __dir__ = lazily(__name__, __file__)
