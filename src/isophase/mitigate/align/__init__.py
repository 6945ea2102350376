"""Aligned prompts: records start at strong phases, and the change can be undone byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.mitigate.align.curve import read_curve
    from isophase.mitigate.align.file import aligned_path, read_text, undo, write_aligned
    from isophase.mitigate.align.formats import format_of
    from isophase.mitigate.align.plan import Span, align
    from isophase.mitigate.align.target import alignment_basis
    from isophase.mitigate.align.text import AlignedText, align_text

__all__ = [
    "AlignedText",
    "Span",
    "align",
    "align_text",
    "aligned_path",
    "alignment_basis",
    "format_of",
    "read_curve",
    "read_text",
    "undo",
    "write_aligned",
]

__getattr__, __dir__ = lazily(__name__, __file__)
