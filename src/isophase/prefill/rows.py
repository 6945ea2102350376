"""Exact causal attention of single queries, some rows at a time.

Legend: S queries, L keys, D head width, R rows of a chunk, W keys up to a chunk's last query.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Rows that are computed together, and their numbers at most: they stay in cache, and see no further than the last row.
_ROWS, _NUMBERS = 16, 2**19
# Rows are kept for a second walk up to this many numbers (8 MiB); of longer prompts they are computed again.
_KEPT_NUMBERS = 2**21


class Rows:
    """Attention of some queries over the keys before them, in chunks; can be walked over more than once.

    Args:
        query_SD: queries.
        key_LD: keys.
        positions_S: position of each query, long, rising.
        scaling: factor of the logits.
        keep: that they will be walked over again.
    """

    def __init__(
        self, query_SD: torch.Tensor, key_LD: torch.Tensor, positions_S: torch.Tensor, scaling: float, *,
        keep: bool = False,
    ) -> None:  # fmt: skip
        self._query_SD, self._key_LD, self.positions_S = query_SD * scaling, key_LD, positions_S
        kept = keep and int(positions_S.sum()) <= _KEPT_NUMBERS
        self._kept: list[tuple[slice, torch.Tensor]] | None = [] if kept else None

    def __len__(self) -> int:
        return len(self.positions_S)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Which queries, and their softmax in float32, [R, W]; 0 after each query. Kept ones are not to be changed."""
        if self._kept:
            yield from self._kept
            return
        for chunk in self._chunks():
            if self._kept is not None:
                self._kept.append(chunk)
            yield chunk

    def _chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        positions = self.positions_S.tolist()
        step = max(1, min(_ROWS, _NUMBERS // len(self._key_LD)))
        for first in range(0, len(positions), step):
            at = slice(first, min(first + step, len(positions)))
            low, end = positions[at.start] + 1, positions[at.stop - 1] + 1
            logits_RW = (self._query_SD[at] @ self._key_LD[:end].T).float()
            if low < end:
                later_RE = torch.arange(low, end, device=logits_RW.device) > self.positions_S[at, None]
                logits_RW[:, low:].masked_fill_(later_RE, -torch.inf)
            yield at, logits_RW.softmax(dim=-1)


def attention_rows(
    query_SD: torch.Tensor, key_LD: torch.Tensor, positions_S: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention of single queries over all keys.

    Args:
        query_SD: queries.
        key_LD: keys.
        positions_S: position of each query, long, rising.
        scaling: factor of the logits.

    Returns:
        Softmax in float32, [S, L]; 0 after each query.
    """
    rows_SL = torch.zeros(len(query_SD), len(key_LD), device=query_SD.device)
    for at, rows_RW in Rows(query_SD, key_LD, positions_S, scaling):
        rows_SL[at, : rows_RW.shape[1]] = rows_RW
    return rows_SL
