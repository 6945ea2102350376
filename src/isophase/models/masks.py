"""Who sees what: entries that have closed, and exact tokens that are near or that no entry covers.

One description, two executions: a dense additive mask (the reference, for eager and sdpa attention) and a
block mask for FlexAttention, which skips what nobody sees. Columns are all entries, then the exact tokens.

Legend: B rows, Q query heads, G groups of KV heads, T new tokens, E entries, L exact tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from isophase.models.chunks import LayerChunks
from isophase.models.config import CompressedQwen3Config


def dense_mask(
    config: CompressedQwen3Config, chunks: LayerChunks | None, past: int, position_T: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask, 0 or the least number of `dtype`.

    Args:
        config: of the model.
        chunks: of the layer; None without compression.
        past: tokens read before this call.
        position_T: positions of the new tokens.
        dtype: of the attention.

    Returns:
        [B or 1, G or 1, T, E + L]: heads of a group see alike, and a mask for each would be as many copies.
    """
    local_L = _local(config, chunks, past, position_T)
    ahead_TL = position_T[:, None] - local_L[None, :]
    visible = (ahead_TL >= 0)[None, None]
    if chunks is not None:
        uncovered = local_L >= chunks.uncovered_BGT[..., None]
        visible = visible & _near(config, ahead_TL, uncovered)
        entries = chunks.close_BGE[:, :, None, :] <= position_T[:, None]
        visible = torch.cat([entries, visible.expand(*entries.shape[:2], -1, -1)], dim=-1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=position_T.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def block_mask(config: CompressedQwen3Config, chunks: LayerChunks | None, past: int, position_T: torch.Tensor) -> Any:
    """The same as a `BlockMask`; arguments as of `dense_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    local_L = _local(config, chunks, past, position_T)
    first = past - (len(local_L) - len(position_T))
    rows = groups = None
    if chunks is None:

        def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return past + query >= first + key

        entries = 0
    else:
        close, uncovered = chunks.close_BGE, chunks.uncovered_BGT
        entries = close.shape[2]
        share = config.num_attention_heads // close.shape[1]
        rows = None if len(close) == 1 else len(close)
        groups = None if close.shape[1] == 1 else config.num_attention_heads
        # An index is looked up for every column, also where the column is no entry.
        padded = torch.nn.functional.pad(close, (0, 1))

        def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            own = row if rows is not None else torch.zeros_like(row)
            group = head // share
            is_entry = key < entries
            closed = padded[own, group, torch.where(is_entry, key, entries)] <= past + query
            token = first + key - entries
            ahead = past + query - token
            exact = (ahead >= 0) & _near(config, ahead, token >= uncovered[own, group, query])
            return torch.where(is_entry, closed, exact)

    device = position_T.device
    return create_block_mask(sees, rows, groups, len(position_T), entries + len(local_L), device=device)


def _local(
    config: CompressedQwen3Config, chunks: LayerChunks | None, past: int, position_T: torch.Tensor
) -> torch.Tensor:
    """Positions of the exact tokens that new queries may read."""
    kept = past if chunks is None else min(config.exact_tokens - 1, past)
    return torch.arange(past - kept, past + len(position_T), device=position_T.device)


def _near(config: CompressedQwen3Config, ahead: torch.Tensor, uncovered: torch.Tensor) -> torch.Tensor:
    """Whether a query reads a token `ahead` tokens before it exactly."""
    if config.local_memory == "tail":
        # The query's own token stays readable even when it closes its chunk.
        return uncovered | (ahead == 0)
    near = ahead < config.local_window
    # On a fixed grid the window alone decides, however short it is.
    return near if config.chunk_rule == "fixed" else near | uncovered
