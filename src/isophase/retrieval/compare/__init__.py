"""Which vectors find answers best in one's own documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.retrieval.compare.metrics import Estimate
    from isophase.retrieval.compare.run import Comparison, compare_rules, read_questions

__all__ = ["Comparison", "Estimate", "compare_rules", "read_questions"]

__getattr__, __dir__ = lazily(__name__, __file__)
