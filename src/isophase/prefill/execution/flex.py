"""FlexAttention along a plan: the executor for CUDA.

Columns are gathered and put before the keys, so that they cost whole tiles of their own and not a tile of keys each.

Legend: H query heads, K KV heads, T queries, L keys, D head width, C places for columns, Q, N blocks of the plan.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from isophase.prefill.execution.plan import Plan

_TILE = 128


def attend_flex(
    query_HTD: torch.Tensor,
    key_KLD: torch.Tensor,
    value_KLD: torch.Tensor,
    plan: Plan,
    *,
    scaling: float | None = None,
    compiled: bool = True,
) -> torch.Tensor:
    """Attention along a plan with FlexAttention.

    Args:
        query_HTD: queries of the last T positions.
        key_KLD: keys.
        value_KLD: values.
        plan: what is read, on the device of the queries.
        scaling: factor of the logits; default D ** -0.5.
        compiled: skip what is not read; without, everything is computed and masked.

    Returns:
        [H, T, D].
    """
    group = len(query_HTD) // len(key_KLD)
    places_HC, keys, values = _with_columns(plan, key_KLD, value_KLD, group)
    mask = _block_mask(plan, places_HC)
    attend: Any = _compiled() if compiled else flex_attention
    return attend(query_HTD[None], keys[None], values[None], block_mask=mask, scale=scaling)[0]  # type: ignore[no-any-return]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _with_columns(
    plan: Plan, key_KLD: torch.Tensor, value_KLD: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places of columns [H, C], -1 for none; keys and values of each query head, columns first, [H, C + L, D]."""
    most = max((c.numel() for c in plan.columns), default=0)
    places = -(-most // _TILE) * _TILE
    device = key_KLD.device
    places_HC = torch.full((plan.heads, places), -1, dtype=torch.long, device=device)
    for head, column in enumerate(plan.columns):
        places_HC[head, : column.numel()] = column
    at_HCD = places_HC.clamp(min=0)[..., None].expand(-1, -1, key_KLD.shape[-1])
    wide = (x.repeat_interleave(group, dim=0) for x in (key_KLD, value_KLD))
    keys, values = (torch.cat([x.gather(1, at_HCD), x], dim=1) for x in wide)
    return places_HC, keys, values


def _block_mask(plan: Plan, places_HC: torch.Tensor) -> BlockMask:
    """Which tiles are read at all, and the exact mask inside them."""
    columns = places_HC.shape[1]
    blocks_HQN, starts_Q = plan.blocks_HQN.contiguous(), plan.starts_Q
    first, query_tokens, key_tokens = plan.first_query, plan.query_tokens, plan.key_tokens
    window, last = plan.window_tokens, plan.tokens - 1

    def reads(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        block = q // query_tokens
        start, position = starts_Q[block], q + first
        key = (kv - columns).clamp(0, last)
        if not columns:
            chosen = blocks_HQN[h, block, key // key_tokens] | (key >= start)
        else:
            # A place that is no column stands for a key after every query: it is read by none.
            place = places_HC[h, kv.clamp(max=columns - 1)]
            place = torch.where(place < 0, last + 1, place)
            is_column = kv < columns
            key = torch.where(is_column, place, key)
            in_block = blocks_HQN[h, block, key.clamp(max=last) // key_tokens] | (key >= start)
            chosen = in_block != is_column  # a column that a block holds is read there, and once
        chosen = chosen & (key <= position)
        return chosen & (key > position - window) if window is not None else chosen

    # Tiles that may hold something; the mask decides inside them.
    tiles_HQN = _tiles(plan, places_HC)
    number_HQ = tiles_HQN.sum(-1, dtype=torch.int32)
    order_HQN = tiles_HQN.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        number_HQ[None], order_HQN[None], BLOCK_SIZE=_TILE, mask_mod=reads,
        seq_lengths=(plan.queries, columns + plan.tokens),
    )  # fmt: skip


def _tiles(plan: Plan, places_HC: torch.Tensor) -> torch.Tensor:
    """Tiles of queries by tiles of columns and keys that may hold something, bool."""
    device = plan.blocks_HQN.device
    tile_q = torch.arange(0, plan.queries, _TILE, device=device)
    tile_k = torch.arange(0, plan.tokens, _TILE, device=device)
    block_q = torch.arange(plan.blocks_HQN.shape[1], device=device) * plan.query_tokens
    block_k = torch.arange(plan.blocks_HQN.shape[2], device=device) * plan.key_tokens
    touch_q = ((tile_q[:, None] < block_q + plan.query_tokens) & (block_q < tile_q[:, None] + _TILE)).float()
    touch_k = ((tile_k[:, None] < block_k + plan.key_tokens) & (block_k < tile_k[:, None] + _TILE)).float()
    chosen = torch.einsum("tq,hqn,un->htu", touch_q, plan.blocks_HQN.float(), touch_k) > 0
    # The own blocks: from the start of the block that the tile's first query is in, to its last query.
    start = plan.first_query + tile_q // plan.query_tokens * plan.query_tokens
    end = plan.first_query + (tile_q + _TILE).clamp(max=plan.queries)
    own = (tile_k + _TILE > start[:, None]) & (tile_k < end[:, None])
    if not places_HC.shape[1]:
        return chosen | own
    columns = places_HC.view(len(places_HC), -1, _TILE)
    first = columns.masked_fill(columns < 0, plan.tokens).amin(-1)
    return torch.cat([first[:, None] < end[:, None], chosen | own], dim=-1)
