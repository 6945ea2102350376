"""StreamingLLM: the first tokens and the newest.

Legend: B rows, K KV heads, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isophase.cache.methods.base import Method
from isophase.cache.methods.scene import Scene


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Keeps the first tokens of a row, on which attention rests, and as many of the newest as the budget allows.

    Attributes:
        sink_tokens: first tokens that are kept.

    Raises:
        ValueError: if sinks and window exceed the budget.

    Source: Xiao et al., arXiv 2309.17453. Theirs moves keys to new positions; here keys keep their own.
    """

    window_tokens: int = 1
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens {self.sink_tokens} must not be negative")
        for entries in self.every_budget:
            if entries < self.sink_tokens + self.window_tokens:
                raise ValueError(
                    f"budget {entries} is below {self.sink_tokens} sink tokens and a window of {self.window_tokens}"
                )

    @property
    def needs_votes(self) -> bool:
        """Positions decide."""
        return False

    def score(self, scene: Scene) -> torch.Tensor:
        """Later is better, but for the sinks, which beat everything."""
        index = scene.index_BKE
        return torch.where(index < self.sink_tokens, torch.inf, index.float())
