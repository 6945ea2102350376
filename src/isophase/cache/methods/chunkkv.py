"""ChunkKV: the newest queries vote for chunks of a fixed grid, and chunks are kept whole.

Legend: B rows, H query heads, K KV heads, E entries, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from isophase.cache.methods.base import Method
from isophase.cache.methods.scene import Scene

Average = Literal["sum", "root", "mean"]
_POWER = {"sum": 0.0, "root": 0.5, "mean": 1.0}


def chunk_scores(
    votes_BKE: torch.Tensor, chunk_BKE: torch.Tensor, counted_BKE: torch.Tensor, average: Average
) -> torch.Tensor:
    """Score of the chunk that each entry lies in.

    Args:
        votes_BKE: votes by entry.
        chunk_BKE: number of each entry's chunk, long, from 0.
        counted_BKE: entries that belong to the chunk's length: neither empty nor in the window.
        average: what the summed votes are divided by: nothing, the root of the length, or the length.

    Returns:
        float32 [B, K, E], equal within a chunk.
    """
    chunks = int(chunk_BKE.max()) + 1 if chunk_BKE.numel() else 0
    sums_BKC = votes_BKE.new_zeros(*votes_BKE.shape[:2], chunks)
    lengths_BKC = sums_BKC.scatter_add(2, chunk_BKE, counted_BKE.to(votes_BKE.dtype)).clamp(min=1)
    sums_BKC = sums_BKC.scatter_add(2, chunk_BKE, votes_BKE)
    return (sums_BKC / lengths_BKC.pow(_POWER[average])).gather(2, chunk_BKE)


@dataclass(frozen=True, kw_only=True)
class ChunkKV(Method):
    """Keeps the chunks that the newest queries attend to, best first.

    The last chunk that the budget reaches keeps its first tokens, so the budget is exact whatever the length.
    Chunks are counted from the first token of a row. With `chunk_tokens=1` single tokens are chosen.

    Attributes:
        chunk_tokens: length of a chunk.
        shift_tokens: moves the grid to the right; 0 to `chunk_tokens - 1`.
        share_heads: one choice for all KV heads of a layer, by their average votes.
        reuse_layers: layers that share one choice, 2 in the paper's experiments.

    Raises:
        ValueError: for values out of range.

    Source: Liu et al., arXiv 2502.00299, algorithms 1 and 2. The paper writes one head; its authors' code in
    kvpress shares the choice between heads (`share_heads=True`). Chunks end where the window begins.
    """

    chunk_tokens: int = 10
    shift_tokens: int = 0
    share_heads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} must be at least 1")
        if not 0 <= self.shift_tokens < self.chunk_tokens:
            raise ValueError(f"shift_tokens {self.shift_tokens} must lie in 0..{self.chunk_tokens - 1}")

    @property
    def grid_tokens(self) -> int | None:
        """The chunks."""
        return self.chunk_tokens if self.chunk_tokens > 1 else None

    def score(self, scene: Scene) -> torch.Tensor:
        """Summed votes of each entry's chunk."""
        chunk_BKE = (scene.index_BKE + (-self.shift_tokens) % self.chunk_tokens) // self.chunk_tokens
        return chunk_scores(votes_by_kv_head(scene, self.share_heads), chunk_BKE, ~scene.protected_BKE, "sum")


def votes_by_kv_head(scene: Scene, share_heads: bool) -> torch.Tensor:
    """Votes averaged over the query heads of each KV head, or over all. [B, K, E]."""
    votes_BKE = scene.by_kv_head(scene.votes_BHE())
    return votes_BKE.mean(dim=1, keepdim=True).expand_as(votes_BKE).contiguous() if share_heads else votes_BKE
