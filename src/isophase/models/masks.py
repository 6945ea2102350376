"""Who sees what: entries that have closed, and exact tokens that are near, sinks, or covered by no entry.

One description, two executions: a dense additive mask (the reference, for eager and sdpa attention) and a
block mask for FlexAttention, which skips what nobody sees. Columns are all entries, then the exact tokens, sinks
first. What is added to the logits of entries is part of the dense mask, and apart from a block mask.

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
    """Additive mask: the least number of `dtype` where nothing is seen, else 0, or the bias of an entry.

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
        visible = visible & _exact(config, local_L, ahead_TL, chunks.uncovered_BGT[..., None])
        entries = chunks.close_BGE[:, :, None, :] <= position_T[:, None]
        visible = torch.cat([entries, visible.expand(*entries.shape[:2], -1, -1)], dim=-1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=position_T.device)
    if chunks is not None and chunks.bias_BGE is not None:
        mask[..., : chunks.bias_BGE.shape[2]] = chunks.bias_BGE[:, :, None].to(dtype)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def block_mask(config: CompressedQwen3Config, chunks: LayerChunks | None, past: int, position_T: torch.Tensor) -> Any:
    """The same as a `BlockMask`, without the bias (see `block_bias`); arguments as of `dense_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    local_L = _local(config, chunks, past, position_T)
    sinks = _sinks_apart(config, chunks, past)
    first = past - (len(local_L) - len(position_T) - sinks)
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
            column = key - entries
            token = torch.where(column < sinks, column, first + column - sinks) if sinks else first + column
            ahead = past + query - token
            exact = (ahead >= 0) & _exact(config, token, ahead, uncovered[own, group, query])
            return torch.where(is_entry, closed, exact)

    device = position_T.device
    return create_block_mask(sees, rows, groups, len(position_T), entries + len(local_L), device=device)


def block_bias(chunks: LayerChunks | None, query_BQTH: torch.Tensor, columns: int) -> torch.Tensor | None:
    """What FlexAttention adds to the logits beside a `BlockMask`; None: nothing.

    Args:
        chunks: of the layer; None without compression.
        query_BQTH: queries, for their shape.
        columns: entries and exact tokens.

    Returns:
        float32 [B, Q, T, columns]; queries share memory.
    """
    if chunks is None or chunks.bias_BGE is None:
        return None
    rows, heads, tokens, _ = query_BQTH.shape
    bias = torch.nn.functional.pad(chunks.bias_BGE, (0, columns - chunks.bias_BGE.shape[2]))
    bias = bias.repeat_interleave(heads // bias.shape[1], dim=1)
    return bias[:, :, None].expand(rows, heads, tokens, columns)


def _local(
    config: CompressedQwen3Config, chunks: LayerChunks | None, past: int, position_T: torch.Tensor
) -> torch.Tensor:
    """Positions of the exact tokens that new queries may read: sinks that lie apart, then the newest tokens."""
    first, end = past - _kept(config, chunks, past), past + len(position_T)
    local_L = torch.arange(first, end, device=position_T.device)
    sinks = _sinks_apart(config, chunks, past)
    return torch.cat([torch.arange(sinks, device=position_T.device), local_L]) if sinks else local_L


def _kept(config: CompressedQwen3Config, chunks: LayerChunks | None, past: int) -> int:
    """Newest tokens of earlier calls that are kept exact."""
    return past if chunks is None else min(config.exact_tokens - 1, past)


def _sinks_apart(config: CompressedQwen3Config, chunks: LayerChunks | None, past: int) -> int:
    """Sinks that are not among the newest tokens."""
    return min(config.sink_tokens, past - _kept(config, chunks, past))


def _exact(
    config: CompressedQwen3Config, token: torch.Tensor, ahead: torch.Tensor, uncovered: torch.Tensor
) -> torch.Tensor:
    """Whether a query reads a token, `ahead` tokens before it, exactly; from `uncovered` on no entry covers any."""
    if config.local_memory == "tail":
        # The query's own token stays readable even when it closes its chunk.
        exact = (token >= uncovered) | (ahead == 0)
    elif config.chunk_rule == "fixed":
        # On a fixed grid the window alone decides, however short it is.
        exact = ahead < config.local_window
    else:
        exact = (ahead < config.local_window) | (token >= uncovered)
    return exact | (token < config.sink_tokens) if config.sink_tokens else exact
