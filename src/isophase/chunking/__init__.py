"""Where chunks start, and the layouts that everyone else reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.chunking.layout import NEVER, ChunkLayout, FixedGrid
    from isophase.chunking.merging import Chain, merge_neighbours
    from isophase.chunking.packing import PackedPlan, pack, segment_softmax, segment_sum
    from isophase.chunking.rules import (
        ChunkRule,
        FixedStride,
        LocalMaximum,
        NeighbourCosine,
        RuleState,
        Score,
        StackedScores,
        Threshold,
        TokenHash,
        TokenRanks,
    )

__all__ = [
    "NEVER",
    "Chain",
    "ChunkLayout",
    "ChunkRule",
    "FixedGrid",
    "FixedStride",
    "LocalMaximum",
    "NeighbourCosine",
    "PackedPlan",
    "RuleState",
    "Score",
    "StackedScores",
    "Threshold",
    "TokenHash",
    "TokenRanks",
    "merge_neighbours",
    "pack",
    "segment_softmax",
    "segment_sum",
]

__getattr__, __dir__ = lazily(__name__, __file__)
