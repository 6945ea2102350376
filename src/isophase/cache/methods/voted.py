"""ChunkKV whose grid does not matter: every chunk score is averaged over grids that start at other tokens.

Legend: B rows, K KV heads, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isophase.cache.methods.base import Method
from isophase.cache.methods.chunkkv import chunk_scores, votes_by_kv_head
from isophase.cache.methods.scene import Scene


@dataclass(frozen=True, kw_only=True)
class VotedChunkKV(Method):
    """Scores each token by the chunks around it on several shifted grids, then keeps the best tokens.

    With `votes = chunk_tokens`, all shifts, no phase is left: every token sees the same grids at any place.
    The price is that no chunk is kept as a whole.

    Attributes:
        chunk_tokens: length of a chunk.
        votes: grids, at evenly spaced shifts; None for all `chunk_tokens` of them.
        share_heads: as in `ChunkKV`.

    Raises:
        ValueError: for values out of range.

    Source: ours; averages over shifts as in cycle spinning (Coifman and Donoho, 1995).
    """

    chunk_tokens: int = 10
    votes: int | None = None
    share_heads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} must be at least 1")
        if self.votes is not None and not 1 <= self.votes <= self.chunk_tokens:
            raise ValueError(f"votes {self.votes} must lie in 1..{self.chunk_tokens}")

    def score(self, scene: Scene) -> torch.Tensor:
        """Average over grids of the summed votes of each entry's chunk."""
        votes_BKE = votes_by_kv_head(scene, self.share_heads)
        grids = self.votes or self.chunk_tokens
        total_BKE = torch.zeros_like(votes_BKE)
        for grid in range(grids):
            shift = grid * self.chunk_tokens // grids
            chunk_BKE = (scene.index_BKE + shift) // self.chunk_tokens
            total_BKE += chunk_scores(votes_BKE, chunk_BKE, ~scene.protected_BKE, "sum")
        return total_BKE / grids
