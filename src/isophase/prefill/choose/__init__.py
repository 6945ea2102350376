"""What decides how much a head reads: the adaptive mode, tables, the offline search, the price of it all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.prefill.choose.offline import search_text

__all__ = ["search_text"]

__getattr__, __dir__ = lazily(__name__, __file__)
