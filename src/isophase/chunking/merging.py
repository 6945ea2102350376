"""Neighbours are merged where it costs least, until as many chunks are left as were asked for.

A chain of units (tokens, words, or what was merged before) is cut into chunks. What a chunk of n tokens with the
summed weight I costs is `I (1 - 1/n)`: nothing for a token alone, nearly its whole weight for one that melts into many.
Heavy tokens therefore stand alone, and runs of light ones melt together. Weights add up, so merging in steps and at
once come to nearly the same.

Legend: R rows, U units, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Chain", "merge_neighbours"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """Units in their order, right-aligned: a row with fewer has empty ones, of 0 tokens, on the left.

    Attributes:
        tokens_RU: tokens of each unit, long.
        weight_RU: what is lost with it when it melts into much else, float32, not negative.
    """

    tokens_RU: torch.Tensor
    weight_RU: torch.Tensor

    def summed(self, group_RU: torch.Tensor, groups: int) -> Chain:
        """The chain whose units are groups of these; -1 belongs to none."""
        place = group_RU.clamp(min=0)
        inside = group_RU >= 0
        shape = (len(place), groups)
        return Chain(
            tokens_RU=self.tokens_RU.new_zeros(shape).scatter_add(1, place, self.tokens_RU * inside),
            weight_RU=self.weight_RU.new_zeros(shape).scatter_add(1, place, self.weight_RU * inside),
        )


def merge_neighbours(chain: Chain, chunks_R: torch.Tensor, *, most_tokens: int = 32) -> torch.Tensor:
    """Merge the cheapest neighbours until each row has so many chunks.

    Args:
        chain: the units.
        chunks_R: chunks that each row shall have, long, at least 1; a row with fewer units keeps them as they are.
        most_tokens: longest chunk, unless so many chunks could not hold the row.

    Returns:
        Chunk of each unit, long [R, U], rising from 0; -1 for an empty one.
    """
    units = chain.tokens_RU.shape[1]
    device = chain.tokens_RU.device
    there_RU = chain.tokens_RU > 0
    group_RU = (there_RU.long().cumsum(1) - 1).masked_fill(~there_RU, -1)
    now = chain.summed(group_RU, units)
    count_R = there_RU.sum(1)
    excess_R = (count_R - chunks_R.clamp(min=1)).clamp(min=0)
    place_U = torch.arange(units, device=device)
    while int(excess_R.max()) > 0:
        width = int(count_R.max())
        tokens_RC, weight_RC = now.tokens_RU[:, :width], now.weight_RU[:, :width]
        cost_RC = _price(tokens_RC, weight_RC, most_tokens)
        real_RC = place_U[: width - 1] + 1 < count_R[:, None]
        cost_RC = cost_RC.masked_fill(~real_RC, torch.inf)
        # Cheaper than both neighbours: these can be merged side by side, and no order among them matters.
        pad = torch.nn.functional.pad
        before = pad(cost_RC, (1, 0), value=torch.inf)[:, :-1]
        after = pad(cost_RC, (0, 1), value=torch.inf)[:, 1:]
        least_RC = real_RC & (cost_RC < before) & (cost_RC <= after)
        # Half of them at a time, the cheapest, so that what a merge makes dearer is seen before the dear ones go.
        share_R = torch.minimum((least_RC.sum(1) + 1) // 2, excess_R)
        order_RC = cost_RC.masked_fill(~least_RC, torch.inf).argsort(dim=1, stable=True)
        rank_RC = torch.empty_like(order_RC).scatter_(1, order_RC, place_U[: width - 1].expand_as(order_RC))
        merged_RC = least_RC & (rank_RC < share_R[:, None])
        # A unit that is merged into the one before it starts no group.
        starts_RC = pad(~merged_RC, (1, 0), value=True).long()
        into_RC = starts_RC.cumsum(1) - 1
        group_RU = torch.where(group_RU >= 0, into_RC.gather(1, group_RU.clamp(0, width - 1)), -1)
        taken = merged_RC.sum(1)
        count_R, excess_R = count_R - taken, excess_R - taken
        real_C = place_U[:width] < (count_R + taken)[:, None]
        now = Chain(tokens_RU=tokens_RC, weight_RU=weight_RC).summed(into_RC.masked_fill(~real_C, -1), width)
    return group_RU


def _price(tokens_RC: torch.Tensor, weight_RC: torch.Tensor, most_tokens: int) -> torch.Tensor:
    """What merging each chunk with the next one costs more than leaving both, [R, C - 1]."""
    share_RC = 1 - 1 / tokens_RC.clamp(min=1)
    alone = weight_RC * share_RC
    tokens = tokens_RC[:, 1:] + tokens_RC[:, :-1]
    together = (weight_RC[:, 1:] + weight_RC[:, :-1]) * (1 - 1 / tokens.clamp(min=1))
    price = together - alone[:, 1:] - alone[:, :-1]
    # Too long a chunk is the last resort, the shortest first.
    # Equal prices would be merged one a round: a part in a million, by place, tells them apart.
    place_C = torch.arange(price.shape[1], device=price.device)
    price = price.clamp(min=1e-12) * (1 + (place_C * 40503 % 89) * 1e-6)
    return torch.where(tokens > most_tokens, torch.finfo(price.dtype).max / 4 * (1 + tokens / 2**24), price)
