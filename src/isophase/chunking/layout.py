"""Layouts: which tokens an entry covers, when it is visible, where it is anchored.

Legend: B rows, T tokens, E entries, W window (tokens), S stride (tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class FixedGrid:
    """Windows of `window` tokens, one for every `stride` tokens: the chunks of `FixedStride`, and an overlap.

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


NEVER = 1 << 62
"""`close` of a padded entry: no query sees it. A power of two, because `pad` takes its value as a float."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkLayout:
    """Closed chunks of B rows, padded to the row that has most; one row stands for all where rows do not differ.

    Everyone who executes over chunks reads this; nobody else cuts tokens.

    Attributes:
        start_BE: first token of each chunk, long; its entry's rotary embedding is applied there (the anchor).
        end_BE: one past its last token; equal to the start in padding.
        close_BE: first query position that may see the entry; `NEVER` in padding.
    """

    start_BE: torch.Tensor
    end_BE: torch.Tensor
    close_BE: torch.Tensor

    @classmethod
    def from_flags(
        cls, flags_BT: torch.Tensor, lookahead_tokens: int, past_tokens: int, open_start_B: torch.Tensor
    ) -> tuple[ChunkLayout, torch.Tensor]:
        """Chunks that close while some tokens are read.

        Args:
            flags_BT: bool, what a `ChunkRule` said: with token `past + t`, a start `lookahead` before it is known.
            lookahead_tokens: of the rule.
            past_tokens: tokens read before.
            open_start_B: start of the chunk that was open before, long.

        Returns:
            The chunks, and the starts of those that stay open.
        """
        known_T = torch.arange(past_tokens, past_tokens + flags_BT.shape[1], device=flags_BT.device)
        counts_B = flags_BT.sum(dim=1)
        most = int(counts_B.max()) if flags_BT.numel() else 0
        close_BE = torch.where(flags_BT, known_T, NEVER).sort(dim=1).values[:, :most]
        padding = close_BE == NEVER
        # Padding repeats the last boundary, so that it has no tokens.
        ends = torch.where(padding, -1, close_BE - lookahead_tokens)
        bounds = torch.cat([open_start_B[:, None], ends], dim=1).cummax(dim=1).values
        layout = cls(start_BE=bounds[:, :-1], end_BE=bounds[:, 1:], close_BE=close_BE)
        return layout, bounds[:, -1]

    @property
    def entries(self) -> int:
        """E, the length of the longest row."""
        return self.start_BE.shape[1]

    @property
    def counts_B(self) -> torch.Tensor:
        """Chunks of each row, long."""
        return self.filled_BE.sum(dim=1)

    @property
    def filled_BE(self) -> torch.Tensor:
        """Which entries are no padding."""
        return self.close_BE != NEVER

    @property
    def length_BE(self) -> torch.Tensor:
        """Tokens of each chunk; 0 in padding."""
        return self.end_BE - self.start_BE

    def padded_to(self, entries: int) -> ChunkLayout:
        """The same chunks with as many entries per row, at least `self.entries`."""
        more = entries - self.entries
        if not more:
            return self
        pad = torch.nn.functional.pad
        return ChunkLayout(
            start_BE=pad(self.start_BE, (0, more)),
            end_BE=pad(self.end_BE, (0, more)),
            close_BE=pad(self.close_BE, (0, more), value=NEVER),
        )

    def slots(self, window_tokens: int, overlap_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Which token stands at which offset of each chunk's window.

        Args:
            window_tokens: slots W of a window, at least the longest chunk plus the overlap.
            overlap_tokens: slots that reach back before the chunk's start.

        Returns:
            Token positions, long [B, E, W], and which slots are filled, bool [B, E, W]. Offset `overlap` is
            the chunk's own first token, so offsets move with the chunk.
        """
        offset_W = torch.arange(-overlap_tokens, window_tokens - overlap_tokens, device=self.start_BE.device)
        position = self.start_BE[..., None] + offset_W
        filled = (position >= 0) & (position < self.end_BE[..., None]) & self.filled_BE[..., None]
        return position, filled

    def phase(self, position_BT: torch.Tensor) -> torch.Tensor:
        """Offset of token positions in their own chunk, long [B, T]; -1 for tokens of no closed chunk."""
        number = torch.searchsorted(self.end_BE.contiguous(), position_BT.contiguous(), right=True)
        inside = number < self.counts_B[:, None]
        start = self.start_BE.gather(1, number.clamp(max=max(self.entries - 1, 0))) if self.entries else position_BT
        return torch.where(inside, position_BT - start, -1)

    def to_packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Without padding: lengths of all chunks, row after row, and cumulative counts by row (`cu_chunks`)."""
        counts = torch.nn.functional.pad(self.counts_B.cumsum(0), (1, 0))
        return self.length_BE[self.filled_BE], counts
