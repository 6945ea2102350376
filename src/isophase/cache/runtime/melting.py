"""What a melting layer does: who received attention, and how entries become fewer.

Legend: B rows, H query heads, K KV heads, Q sampled queries, E entries held, N entries kept, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isophase.cache.methods.melted import Melted
from isophase.cache.methods.scene import Entries
from isophase.chunking import Chain

# One query in so many is looked at; of a long part, so many in all.
SAMPLE_EVERY, MOST_SAMPLED = 4, 256


@dataclass(frozen=True, kw_only=True)
class Melting:
    """What all layers of a cache melt by, worked out once.

    Attributes:
        index_BL: which of its row's tokens each input is, from 0.
        unit_BL: unit of each input.
        information_BL: nats of each input, `sharp` included; None where nobody asks.
        entries_B: of a hard budget, sinks and window included; None without one.
        decided_B: tokens before this one have melted, and melt on only under a hard budget.
        frontier_B: tokens from this one on stay exact: the window, and the unit that reaches into it.
    """

    index_BL: torch.Tensor
    unit_BL: torch.Tensor
    information_BL: torch.Tensor | None
    entries_B: torch.Tensor | None
    decided_B: torch.Tensor
    frontier_B: torch.Tensor

    def by_place(self, values_BL: torch.Tensor, positions_BKE: torch.Tensor) -> torch.Tensor:
        """Values of inputs at the places of entries, [B, K, E]."""
        return values_BL[:, None].expand(-1, positions_BKE.shape[1], -1).gather(2, positions_BKE.clamp(min=0))


def received(
    query_BHQD: torch.Tensor, query_positions_BQ: torch.Tensor, entries: Entries, scaling: float,
    softcap: float | None, sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention that entries received from later queries, in times an even share.

    Args:
        query_BHQD: some queries.
        query_positions_BQ: their places; -1 for none.
        entries: what the layer holds.
        scaling: factor of the logits.
        softcap: soft limit of the logits, or None.
        sinks_H: logit that each head adds to the denominator, or None.

    Returns:
        Two of float32 [B, K, E]: sum over the queries behind each entry of its probability, a token's share of it,
        times the tokens that the query sees; and the number of these queries.
    """
    rows, heads, asked, width = query_BHQD.shape
    kv_heads = entries.keys_BKED.shape[1]
    query = query_BHQD.reshape(rows, kv_heads, -1, width)
    logits = (query @ entries.keys_BKED.transpose(2, 3)).float() * scaling
    logits = logits.view(rows, kv_heads, heads // kv_heads, asked, -1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counts_BKE = torch.ones_like(entries.positions_BKE, dtype=torch.float32)
    if entries.counts_BKE is not None:
        counts_BKE = entries.counts_BKE.clamp(min=1)
        logits = logits + counts_BKE.log()[:, :, None, None]
    there = (query_positions_BQ >= 0)[:, None, :, None] & (entries.positions_BKE >= 0)[:, :, None]
    seen_BKQE = there & (entries.positions_BKE[:, :, None] <= query_positions_BQ[:, None, :, None])
    logits = logits.masked_fill(~seen_BKQE[:, :, None], -torch.inf)
    if sinks_H is not None:
        sink = sinks_H.float().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        share = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        share = logits.softmax(dim=-1).nan_to_num(0.0)
    tokens_BKQ = (seen_BKQE * counts_BKE[:, :, None]).sum(-1)
    even = share.mean(dim=2) * tokens_BKQ[..., None] / counts_BKE[:, :, None]
    # A token's attention to itself says nothing about others.
    behind = seen_BKQE & (entries.positions_BKE[:, :, None] != query_positions_BQ[:, None, :, None])
    return (even * behind).sum(2), behind.sum(2).float()


def sampled(real_BT: torch.Tensor) -> torch.Tensor:
    """Which of the new tokens' queries are looked at: every so many of a row's own, counted back from its newest.

    Args:
        real_BT: which new inputs are tokens.

    Returns:
        Their numbers, long [B, Q], rising; -1, on the left, where a row has fewer.
    """
    back_BT = real_BT.flip(1).long().cumsum(1).flip(1) - 1
    own_B1 = real_BT.sum(1, keepdim=True)
    step_B1 = torch.div(own_B1 + MOST_SAMPLED - 1, MOST_SAMPLED, rounding_mode="floor").clamp(min=SAMPLE_EVERY)
    chosen_BT = real_BT & (back_BT % step_B1 == 0)
    place_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    most = int(chosen_BT.sum(1).max())
    return torch.where(chosen_BT, place_T, -1).sort(dim=1).values[:, -most:]


def melt(entries: Entries, method: Melted, melting: Melting) -> Entries:
    """Fewer entries for the same tokens.

    Args:
        entries: of one layer, right-aligned, with their sums.
        method: says what goes together.
        melting: for all layers.

    Returns:
        The new entries, right-aligned. What stays alone is what it was, to the bit.
    """
    old, sums_BKES = entries, entries.sums_BKES
    assert sums_BKES is not None
    there_BKE = old.positions_BKE >= 0
    worth_BKE = _worth(entries, sums_BKES, method, melting)
    counts_BKE = (torch.ones_like(worth_BKE) if old.counts_BKE is None else old.counts_BKE) * there_BKE
    index_BKE = melting.by_place(melting.index_BL, old.positions_BKE)
    sink_BKE = there_BKE & (index_BKE < method.sink_tokens)
    exact_BKE = there_BKE & (index_BKE >= melting.frontier_B[:, None, None])
    free_BKE = there_BKE & ~sink_BKE & ~exact_BKE
    if not method.hard_budget:
        free_BKE &= index_BKE >= melting.decided_B[:, None, None]
    room_BK = None
    if melting.entries_B is not None:
        room_BK = (melting.entries_B[:, None] - sink_BKE.sum(-1) - exact_BKE.sum(-1)).clamp(min=1)
        if bool((free_BKE.sum(-1) <= room_BK).all()):
            return old
    flat = free_BKE.flatten(0, 1)
    chain = Chain(tokens_RU=counts_BKE.flatten(0, 1).long() * flat, weight_RU=worth_BKE.flatten(0, 1) * flat)
    unit_RU = melting.by_place(melting.unit_BL, old.positions_BKE).flatten(0, 1)
    target_R = torch.zeros(len(flat), dtype=torch.long, device=flat.device) if room_BK is None else room_BK.flatten()
    group_BKE = method.groups(chain, unit_RU, target_R).view_as(free_BKE)

    # Everything else stays alone: a new entry starts unless a place melts with the one before it.
    joins_BKE = torch.zeros_like(free_BKE)
    joins_BKE[..., 1:] = free_BKE[..., 1:] & free_BKE[..., :-1] & (group_BKE[..., 1:] == group_BKE[..., :-1])
    starts_BKE = there_BKE & ~joins_BKE
    count_BK = starts_BKE.sum(-1)
    most = int(count_BK.max())
    slot_BKE = (starts_BKE.long().cumsum(-1) - 1 + (most - count_BK)[..., None]).masked_fill(~there_BKE, most)
    place_E = torch.arange(slot_BKE.shape[-1], device=slot_BKE.device).expand_as(slot_BKE)
    last_BKN = torch.full((*count_BK.shape, most + 1), -1, device=slot_BKE.device).scatter_reduce(
        2, slot_BKE, place_E, "amax"
    )[..., :most]  # fmt: skip
    kept = old.take(last_BKN)

    def total(values_BKE: torch.Tensor) -> torch.Tensor:
        return values_BKE.new_zeros(*count_BK.shape, most + 1).scatter_add(2, slot_BKE, values_BKE)[..., :most]

    members_BKN = total(there_BKE.float())
    weight_BKN = total(worth_BKE * there_BKE)
    assert kept.sums_BKES is not None
    # What stays exact may receive more attention; the worth of everything else is settled.
    open_BKN = (exact_BKE & there_BKE).gather(2, last_BKN.clamp(min=0)) & (last_BKN >= 0)
    settled_BKN = torch.where(open_BKN, -1.0, weight_BKN)

    def mean(states_BKED: torch.Tensor, alone_BKND: torch.Tensor) -> torch.Tensor:
        wide = slot_BKE[..., None].expand(*slot_BKE.shape, states_BKED.shape[-1])
        weighted = states_BKED.float() * worth_BKE[..., None]
        sums = weighted.new_zeros(*count_BK.shape, most + 1, weighted.shape[-1]).scatter_add(2, wide, weighted)
        means = sums[..., :most, :] / weight_BKN.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        return torch.where(members_BKN[..., None] > 1, means.to(alone_BKND.dtype), alone_BKND)

    return Entries(
        keys_BKED=mean(old.keys_BKED, kept.keys_BKED),
        values_BKED=mean(old.values_BKED, kept.values_BKED),
        positions_BKE=kept.positions_BKE,
        counts_BKE=total(counts_BKE),
        sums_BKES=torch.cat([settled_BKN[..., None], kept.sums_BKES[..., 1:]], dim=-1),
    )


def _worth(entries: Entries, sums_BKES: torch.Tensor, method: Melted, melting: Melting) -> torch.Tensor:
    """What every entry is worth, float32 [B, K, E]: as settled, else by what is known of the token now."""
    settled_BKE, paid_BKE, asked_BKE = sums_BKES.unbind(-1)
    if melting.information_BL is None:
        information = torch.zeros_like(settled_BKE)
    else:
        information = melting.by_place(melting.information_BL, entries.positions_BKE)
    # One even share, where no query stands behind.
    attention = torch.where(asked_BKE > 0, paid_BKE / asked_BKE.clamp(min=1), 1.0)
    return torch.where(settled_BKE >= 0, settled_BKE, method.worth_of(information, attention))
