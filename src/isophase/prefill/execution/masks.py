"""What a transformers mask says: which rows have padding where, and whether a layer slides.

Masks are checked in full, not guessed from a model's name: a row is read sparsely only where its mask is exactly the
causal one, or a sliding one, over one stretch of real tokens. Everything else is left to the model's own attention.

Legend: B rows, T queries, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_STEP_NUMBERS = 2**24


@dataclass(frozen=True, kw_only=True)
class RowSpan:
    """The real tokens of a row.

    Attributes:
        first_key: position of the first one.
        first_query: of this part's first real query, counted in keys.
        end: one after the last.
        window_tokens: of a sliding layer, where the window is shorter than the row.
    """

    first_key: int
    first_query: int
    end: int
    window_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class MaskShape:
    """A mask in few words.

    Attributes:
        rows: the real tokens of each row; None for a row that has no real query in this part.
        offset: key position of query 0.
    """

    rows: tuple[RowSpan | None, ...]
    offset: int


def read_mask(mask: torch.Tensor | None, rows: int, queries: int, keys: int) -> MaskShape | None:
    """Recognise a mask.

    Args:
        mask: bool [B or 1, 1, T, L], True where a query may see a key; None for the causal mask.
        rows: B.
        queries: T.
        keys: L.

    Returns:
        None for a mask that is neither causal nor sliding over one stretch of tokens per row.
    """
    if mask is None:
        whole = RowSpan(first_key=0, first_query=keys - queries, end=keys)
        return MaskShape(rows=(whole,) * rows, offset=keys - queries)
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, rows):
        return None
    mask_BTL = mask[:, 0]
    # Query 0 tells the offset in a row without padding on the left, the last one in a row without it on the right.
    likely = {keys - queries, int(_last(mask_BTL[:, 0]).max()), int(_last(mask_BTL[:, -1]).max()) - queries + 1}
    for offset in sorted(o for o in likely if 0 <= o <= keys - queries):
        spans: list[RowSpan | None] = []
        for row_TL in mask_BTL:
            exact, span = _read_row(row_TL, offset)
            if not exact:
                break
            spans.append(span)
        else:
            return MaskShape(rows=tuple(spans if len(spans) == rows else spans * rows), offset=offset)
    return None


def _last(seen_BL: torch.Tensor) -> torch.Tensor:
    """Position of the last key that is seen; -1 where none is."""
    last_B = seen_BL.shape[-1] - 1 - seen_BL.flip(-1).to(torch.uint8).argmax(-1)
    return last_B.masked_fill(~seen_BL.any(-1), -1)


def _read_row(mask_TL: torch.Tensor, offset: int) -> tuple[bool, RowSpan | None]:
    """Whether a row is causal or sliding, and its real tokens."""
    queries, keys = mask_TL.shape
    real = mask_TL.any(0).nonzero()[:, 0]
    if len(real) == 0:
        return True, None
    # Keys that no query of this part sees are padding, or have left the window: neither is read.
    first, end = int(real[0]), int(real[-1]) + 1
    begin, stop = max(first - offset, 0), min(end - offset, queries)
    if len(real) != end - first:
        return False, None
    if begin >= stop:
        return True, None
    newest = mask_TL[stop - 1]
    oldest_seen = int(newest.to(torch.uint8).argmax())
    window = int(newest.sum()) if oldest_seen > first else None
    key_L = torch.arange(keys, device=mask_TL.device)
    step = max(1, _STEP_NUMBERS // keys)
    for part in range(begin, stop, step):
        last = min(part + step, stop)
        position = torch.arange(part, last, device=mask_TL.device)[:, None] + offset
        expected = (key_L <= position) & (key_L >= first)
        if window is not None:
            expected &= key_L > position - window
        if not torch.equal(expected, mask_TL[part:last]):
            return False, None
    return True, RowSpan(first_key=first, first_query=begin + offset, end=end, window_tokens=window)
