"""Packing: the tokens of ragged chunks in buffers that hardware likes, logical boundaries kept.

Parameters belong to offsets, so tokens are sorted by the slot that they take in their window: one matrix
product per slot, over as many rows as there are tokens, instead of one per slot over as many rows as there are
chunks. The rows of each slot are padded to a multiple of 8, 16 or 32, which tensor cores and vector units
want; padding reads token 0 and is written nowhere.

Legend: B rows, T tokens, E entries (padded), W slots of a window, R rows of the buffer, N = B * E chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isophase.chunking.layout import ChunkLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPlan:
    """Which token stands in which row of the buffer.

    Attributes:
        token_R: index of each row's token in the flat [B * T] stream, long; 0 in padding.
        chunk_R: index of each row's chunk, `b * E + e`, long; N in padding.
        bounds: first row of each slot, and the number of rows, W + 1 numbers; all multiples of `multiple_of`.
        chunks: N.
        used: rows that are no padding.
    """

    token_R: torch.Tensor
    chunk_R: torch.Tensor
    bounds: tuple[int, ...]
    chunks: int
    used: int

    @property
    def rows(self) -> int:
        """R."""
        return self.bounds[-1]

    @property
    def utilisation(self) -> float:
        """Share of rows that hold a token; 1 for an empty buffer."""
        return self.used / self.rows if self.rows else 1.0

    def slots(self) -> list[slice]:
        """Rows of each slot."""
        return [slice(first, last) for first, last in zip(self.bounds[:-1], self.bounds[1:], strict=True)]


def pack(
    layout: ChunkLayout,
    batch: int,
    tokens: int,
    window_tokens: int,
    *,
    overlap_tokens: int = 0,
    first_token: int = 0,
    multiple_of: int = 8,
) -> PackedPlan:
    """Sort the tokens of all chunks by slot.

    Args:
        layout: chunks of B rows, or of one row that stands for all.
        batch: B.
        tokens: T, tokens of each row in the stream.
        window_tokens: slots W of a window.
        overlap_tokens: slots that reach back before a chunk's start.
        first_token: position of the stream's first token.
        multiple_of: the rows of every slot are padded to a multiple of this, at least 1.

    Raises:
        ValueError: for a multiple below 1.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of {multiple_of} must be at least 1")
    position_BEW, filled_BEW = layout.slots(window_tokens, overlap_tokens)
    entries = position_BEW.shape[1]
    device = position_BEW.device
    row_B11 = torch.arange(batch, device=device)[:, None, None]
    token_BEW = row_B11 * tokens + position_BEW - first_token
    chunk_BEW = (row_B11 * entries + torch.arange(entries, device=device)[:, None]).expand_as(token_BEW)
    # Slot by slot, then row by row: [W, B * E].
    filled_WN = filled_BEW.expand_as(token_BEW).permute(2, 0, 1).reshape(window_tokens, -1)
    counts = filled_WN.sum(dim=1).tolist()
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + -(-count // multiple_of) * multiple_of)
    token_R = torch.zeros(bounds[-1], dtype=torch.long, device=device)
    chunk_R = torch.full((bounds[-1],), batch * entries, dtype=torch.long, device=device)
    # The n-th filled place of slot w goes to row bounds[w] + n.
    first_W1 = torch.tensor(bounds[:-1], device=device)[:, None]
    place = (first_W1 + filled_WN.cumsum(dim=1) - 1)[filled_WN]
    token_R[place] = token_BEW.permute(2, 0, 1).reshape(window_tokens, -1)[filled_WN]
    chunk_R[place] = chunk_BEW.permute(2, 0, 1).reshape(window_tokens, -1)[filled_WN]
    return PackedPlan(token_R=token_R, chunk_R=chunk_R, bounds=tuple(bounds), chunks=batch * entries, used=sum(counts))


def segment_softmax(scores_RC: torch.Tensor, chunk_R: torch.Tensor, chunks: int) -> torch.Tensor:
    """Softmax over the rows of each chunk, float32 [R, C].

    Args:
        scores_RC: one score for each row and channel.
        chunk_R: index of each row's chunk; `chunks` in padding, which is a segment of its own.
        chunks: N.
    """
    scores = scores_RC.float()
    index = chunk_R[:, None].expand_as(scores)
    # The largest score only keeps exponentials in range; the result does not depend on it.
    largest = scores.detach().new_full((chunks + 1, scores.shape[1]), float("-inf"))
    largest = largest.scatter_reduce(0, index, scores.detach(), "amax")
    weights = (scores - largest.index_select(0, chunk_R)).exp()
    total = weights.new_zeros(chunks + 1, scores.shape[1]).index_add(0, chunk_R, weights)
    return weights / total.index_select(0, chunk_R)


def segment_sum(values_RC: torch.Tensor, chunk_R: torch.Tensor, chunks: int) -> torch.Tensor:
    """Sum over the rows of each chunk, [N, C]; a chunk without rows gives 0."""
    return values_RC.new_zeros(chunks + 1, values_RC.shape[1]).index_add(0, chunk_R, values_RC)[:chunks]
