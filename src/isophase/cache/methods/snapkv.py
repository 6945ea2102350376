"""SnapKV: the newest queries vote for tokens, and neighbours of a good token are kept with it.

Legend: B rows, H query heads, K KV heads, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from isophase.cache.methods.base import Method
from isophase.cache.methods.scene import Scene


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """Keeps the tokens that the newest queries attend to, smoothed over positions, for each KV head by itself.

    The budget is per KV head, window included: the votes of the query heads that share it are averaged. With a
    budget per query head the cache would be larger by the number of query heads in a group.

    Attributes:
        kernel_tokens: width of the pooling over positions, odd; 1 for none.
        pooling: `mean`, as in the authors' code, or `max`, as in their settings for LongBench.

    Raises:
        ValueError: for an even kernel or an unknown pooling.

    Source: Li et al., arXiv 2404.14469, listing 1.
    """

    window_tokens: int = 32
    kernel_tokens: int = 5
    pooling: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_tokens < 1 or self.kernel_tokens % 2 == 0:
            raise ValueError(f"kernel_tokens {self.kernel_tokens} must be odd and at least 1")
        if self.pooling not in ("mean", "max"):
            raise ValueError(f"pooling {self.pooling!r} must be mean or max")

    def score(self, scene: Scene) -> torch.Tensor:
        """Pooled votes; what lies outside the votable entries counts as 0, as at the edges of a text."""
        votes_BHE = scene.votes_BHE()
        pool = functional.avg_pool1d if self.pooling == "mean" else functional.max_pool1d
        pooled: torch.Tensor = pool(votes_BHE, self.kernel_tokens, stride=1, padding=self.kernel_tokens // 2)
        return scene.by_kv_head(pooled)
