"""The layout of a fixed grid: which tokens an entry covers, when it is visible, where it is anchored.

Legend: E entries, W window (tokens), S stride (tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class FixedGrid:
    """Windows of `window` tokens, one for every `stride` tokens.

    Entry `e` closes with token `(e + 1) * stride - 1` and covers the `window` tokens up to there.
    With `window > stride` the first entries reach back before token 0; those slots are empty. This
    is the grid of DeepSeek V4: CSA is `window=8, stride=4`, HCA `window=stride=128`.

    Attributes:
        window_tokens: W, at least `stride_tokens`.
        stride_tokens: S, at least 1.

    Raises:
        ValueError: if the stride exceeds the window (tokens would belong to no entry).
    """

    window_tokens: int
    stride_tokens: int

    def __post_init__(self) -> None:
        if self.stride_tokens < 1:
            raise ValueError(f"stride {self.stride_tokens} must be at least 1 token")
        if self.stride_tokens > self.window_tokens:
            raise ValueError(
                f"stride {self.stride_tokens} is larger than the window {self.window_tokens}: tokens between "
                "windows would be lost; choose a stride of at most the window"
            )

    @property
    def overlap_tokens(self) -> int:
        """Tokens of a window that belong to the previous stride, W - S."""
        return self.window_tokens - self.stride_tokens

    def entries(self, length_tokens: int) -> int:
        """Number of closed entries after `length_tokens` tokens."""
        return length_tokens // self.stride_tokens

    def close(self, first: int, last: int, device: torch.device | None = None) -> torch.Tensor:
        """First query position that may see each of entries `first..last-1`. Long [E]."""
        entry_E = torch.arange(first, last, device=device)
        return (entry_E + 1) * self.stride_tokens - 1

    def anchor(self, first: int, last: int, device: torch.device | None = None) -> torch.Tensor:
        """Position at which each entry's rotary embedding is applied: its stride's first token. Long [E]."""
        return torch.arange(first, last, device=device) * self.stride_tokens

    def phase(self, position_tokens: torch.Tensor) -> torch.Tensor:
        """Phase of each absolute token position, 0..S-1."""
        return position_tokens % self.stride_tokens
