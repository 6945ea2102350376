"""ChunkKV that melts the next-best chunks into one entry each, instead of dropping them.

Legend: B rows, K KV heads, E entries, C chunks, N entries kept, S entries melted away, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from isophase.cache.methods.chunkkv import ChunkKV, chunk_scores, votes_by_kv_head
from isophase.cache.methods.scene import Entries, Scene


@dataclass(frozen=True, kw_only=True)
class MergedChunks(ChunkKV):
    """Keeps the best chunks exact and the next-best as one entry each.

    A melted entry stands at the middle of its tokens: their keys are turned back by the rotary embedding to that
    position and averaged, and the entry counts as often as it has tokens (log-count added to its logit).

    Attributes:
        merged_share: share of the budget outside the window that melted entries may take.
        weights: `votes`, by the attention that each token got; `mean`, all tokens alike.

    Raises:
        ValueError: for values out of range, or with `reuse_layers`: entries made of one layer's keys are its own.

    Source: ours; log-count as in token merging (Bolya et al., arXiv 2210.09461).
    """

    merged_share: float = 0.25
    weights: Literal["votes", "mean"] = "votes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.merged_share <= 1:
            raise ValueError(f"merged_share {self.merged_share} must lie in 0..1")
        if self.weights not in ("votes", "mean"):
            raise ValueError(f"weights {self.weights!r} must be votes or mean")
        if self.reuse_layers > 1:
            raise ValueError("merged chunks cannot reuse another layer's choice; leave reuse_layers at 1")

    @property
    def needs_rotation(self) -> bool:
        """Keys move to the middle of their chunk."""
        return True

    def compress(self, scene: Scene) -> tuple[Entries, torch.Tensor | None]:
        """As `Method.compress`; entries are made, so there is no index."""
        old = scene.entries
        votes_BKE = votes_by_kv_head(scene, self.share_heads)
        chunk_BKE = (scene.index_BKE + (-self.shift_tokens) % self.chunk_tokens) // self.chunk_tokens
        free_BKE = ~(scene.protected_BKE | scene.empty_BKE)
        score_BKE = chunk_scores(votes_BKE, chunk_BKE, ~scene.protected_BKE, "sum")
        group_BKE, most = self._groups(scene, score_BKE, chunk_BKE, free_BKE)

        # One slot for what is dropped, at the end; it is cut off.
        kept_BKE = group_BKE >= 0
        slot_BKE = torch.where(kept_BKE, group_BKE, most)
        tokens_BKE = torch.ones_like(votes_BKE) if old.counts_BKE is None else old.counts_BKE
        weight_BKE = tokens_BKE if self.weights == "mean" else tokens_BKE * (votes_BKE + 1e-6)
        counts_BKN = _add(tokens_BKE * kept_BKE, slot_BKE, most)
        share_BKE = weight_BKE / _spread(_add(weight_BKE, slot_BKE, most), slot_BKE)
        # Tokens at the window's and the exact chunks' places are alone in their slots: share 1, distance 0.
        place_BKE = old.positions_BKE.clamp(min=0)
        middle_BKN = (_add(place_BKE * share_BKE.double(), slot_BKE, most)).round().long()
        distance_BKE = _spread(middle_BKN, slot_BKE) - place_BKE
        assert scene.rotate is not None
        alone_BKE = (_add(torch.ones_like(votes_BKE), slot_BKE, most).gather(2, slot_BKE) == 1)[..., None]
        turned = torch.where(alone_BKE, old.keys_BKED, scene.rotate(old.keys_BKED, distance_BKE))
        keys_BKND, values_BKND = _blend(turned, share_BKE, slot_BKE, most), _blend(
            old.values_BKED, share_BKE, slot_BKE, most
        )  # fmt: skip
        made = Entries(
            keys_BKED=keys_BKND[:, :, :most],
            values_BKED=values_BKND[:, :, :most],
            positions_BKE=middle_BKN[:, :, :most].masked_fill(counts_BKN[:, :, :most] == 0, -1),
            counts_BKE=counts_BKN[:, :, :most],
        )
        return made.take(_right_aligned(made.positions_BKE)), None

    def _groups(
        self, scene: Scene, score_BKE: torch.Tensor, chunk_BKE: torch.Tensor, free_BKE: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Number of the kept entry that each old one goes into, -1 for none; and the largest number of entries."""
        ranked = score_BKE.masked_fill(~free_BKE, -torch.inf)
        order_BKE = ranked.argsort(dim=-1, descending=True, stable=True)
        chunk_sorted = chunk_BKE.gather(2, order_BKE)
        free_sorted = free_BKE.gather(2, order_BKE)
        # Chunks in order of rank: a chunk's entries are neighbours, because they have one score and stand in order.
        fresh = torch.ones_like(free_sorted)
        fresh[..., 1:] = chunk_sorted[..., 1:] != chunk_sorted[..., :-1]
        rank_sorted = (fresh & free_sorted).long().cumsum(-1) - 1
        chunks_BK = (fresh & free_sorted).sum(-1)
        # Free entries up to and including each one's chunk.
        places = torch.arange(order_BKE.shape[-1], device=order_BKE.device)
        end_of_rank = torch.zeros_like(order_BKE).scatter_reduce(
            2, rank_sorted.clamp(min=0), torch.where(free_sorted, places + 1, 0), "amax"
        )
        kept_window_BK = (scene.protected_BKE & ~scene.empty_BKE).sum(-1)
        room_BK = (scene.budget_B[:, None] - kept_window_BK).clamp(min=0)
        room_BK = torch.minimum(room_BK, free_BKE.sum(-1))
        melted_BK = (room_BK * self.merged_share).long()

        def cost(exact_chunks: torch.Tensor) -> torch.Tensor:
            before = end_of_rank.gather(2, (exact_chunks - 1).clamp(min=0)) * (exact_chunks > 0)
            return before + torch.minimum(chunks_BK[..., None] - exact_chunks, melted_BK[..., None])

        tried = places.expand_as(order_BKE) + 1
        fits = (cost(tried) <= room_BK[..., None]) & (tried <= chunks_BK[..., None])
        exact_BK = fits.sum(-1)  # cost never falls, so what fits comes first
        spare_BK = room_BK - cost(exact_BK[..., None])[..., 0]
        made_BK = torch.minimum(chunks_BK - exact_BK, melted_BK)
        exact_entries = (end_of_rank.gather(2, (exact_BK - 1).clamp(min=0)[..., None])[..., 0]) * (exact_BK > 0)

        is_exact = free_sorted & (places < (exact_entries + spare_BK)[..., None])
        melts = free_sorted & ~is_exact & (rank_sorted < (exact_BK + made_BK)[..., None])
        group_sorted = torch.where(is_exact, places, -1)
        first_melted = (exact_entries + spare_BK - exact_BK)[..., None]
        group_sorted = torch.where(melts, first_melted + rank_sorted, group_sorted)
        group_BKE = torch.full_like(order_BKE, -1).scatter(2, order_BKE, group_sorted)
        window = scene.protected_BKE & ~scene.empty_BKE
        number = window.long().cumsum(-1) - 1 + room_BK[..., None]
        return torch.where(window, number, group_BKE), int((room_BK + kept_window_BK).max())


def _add(values_BKE: torch.Tensor, slot_BKE: torch.Tensor, slots: int) -> torch.Tensor:
    """Sum by slot. [B, K, slots + 1]."""
    sums = values_BKE.new_zeros(*values_BKE.shape[:2], slots + 1)
    return sums.scatter_add(2, slot_BKE, values_BKE)


def _spread(values_BKN: torch.Tensor, slot_BKE: torch.Tensor) -> torch.Tensor:
    """Each old entry's slot's value."""
    return values_BKN.gather(2, slot_BKE)


def _blend(states_BKED: torch.Tensor, share_BKE: torch.Tensor, slot_BKE: torch.Tensor, slots: int) -> torch.Tensor:
    """Weighted sum by slot, in float32."""
    weighted = states_BKED.float() * share_BKE[..., None]
    sums = weighted.new_zeros(*states_BKED.shape[:2], slots + 1, states_BKED.shape[-1])
    return sums.scatter_add(2, slot_BKE[..., None].expand_as(weighted), weighted).to(states_BKED.dtype)


def _right_aligned(positions_BKN: torch.Tensor) -> torch.Tensor:
    """Index that puts entries in the order of their positions, empty places first."""
    return positions_BKN.argsort(dim=-1, stable=True)
