"""What a method sees of one layer when it must choose: entries, the queries that vote, and the budget.

Legend: B rows, H query heads, K KV heads, G = H / K, E entries, N entries kept, W voting queries, D head
width, L logical length.

Rows are right-aligned: the newest entry of every row is in the last place, and a row with fewer entries
has empty places on the left (position -1). So neither padding nor batch-mates can change a choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True)
class Entries:
    """What a layer stores.

    Attributes:
        keys_BKED: rotary applied.
        values_BKED: the values.
        positions_BKE: place in the padded input, long; -1 where a row has no entry.
        counts_BKE: tokens merged into each entry, float32; None where every entry is one token.
        worth_BKE: what each is worth to a memory that melts, float32; None elsewhere.
    """

    keys_BKED: torch.Tensor
    values_BKED: torch.Tensor
    positions_BKE: torch.Tensor
    counts_BKE: torch.Tensor | None = None
    worth_BKE: torch.Tensor | None = None

    def take(self, index_BKN: torch.Tensor) -> Entries:
        """The entries at `index_BKN` (long; -1 gives an empty place)."""
        place = index_BKN.clamp(min=0)
        wide_key = place[..., None].expand(*place.shape, self.keys_BKED.shape[-1])
        wide_value = place[..., None].expand(*place.shape, self.values_BKED.shape[-1])
        return Entries(
            keys_BKED=self.keys_BKED.gather(2, wide_key),
            values_BKED=self.values_BKED.gather(2, wide_value),
            positions_BKE=self.positions_BKE.gather(2, place).masked_fill(index_BKN < 0, -1),
            counts_BKE=None if self.counts_BKE is None else self.counts_BKE.gather(2, place),
            worth_BKE=None if self.worth_BKE is None else self.worth_BKE.gather(2, place),
        )


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One layer at the moment of compression.

    Attributes:
        entries: everything the layer holds, new tokens included.
        queries_BHWD: the newest queries, rotary applied.
        query_positions_BW: their places in the padded input; -1 where a row has fewer.
        scaling: factor of the logits.
        softcap: soft limit of the logits, or None.
        sinks_H: logit that each head adds to the denominator, or None.
        budget_B: entries that each row may keep in each KV head.
        window_B: newest entries of each row that are never dropped.
        index_BL: which of its row's tokens each place of the input is; pads count as the token before them.
        chunk_BL: content-defined chunk of each place, for methods that need ids; else None.
        rotate: moves keys [B, K, N, D] by a number of positions [B, K, N]; None where no method needs it.
    """

    entries: Entries
    queries_BHWD: torch.Tensor
    query_positions_BW: torch.Tensor
    scaling: float
    softcap: float | None
    sinks_H: torch.Tensor | None
    budget_B: torch.Tensor
    window_B: torch.Tensor
    index_BL: torch.Tensor
    chunk_BL: torch.Tensor | None
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None

    @cached_property
    def empty_BKE(self) -> torch.Tensor:
        """Places without an entry."""
        return self.entries.positions_BKE < 0

    @cached_property
    def protected_BKE(self) -> torch.Tensor:
        """The newest entries of each row, which are never dropped."""
        places = self.entries.positions_BKE.shape[-1]
        age_E = torch.arange(places - 1, -1, -1, device=self.budget_B.device)
        return (age_E < self.window_B[:, None])[:, None].expand_as(self.empty_BKE)

    @cached_property
    def index_BKE(self) -> torch.Tensor:
        """Which of its row's tokens each entry is, from 0; a merged entry counts as the token it stands at."""
        return self._by_place(self.index_BL)

    def chunk_BKE(self) -> torch.Tensor:
        """Content-defined chunk of each entry."""
        assert self.chunk_BL is not None
        return self._by_place(self.chunk_BL)

    def _by_place(self, values_BL: torch.Tensor) -> torch.Tensor:
        positions = self.entries.positions_BKE.clamp(min=0)
        return values_BL[:, None].expand(-1, positions.shape[1], -1).gather(2, positions)

    def votes_BHE(self) -> torch.Tensor:
        """Attention that the newest queries pay to each entry outside the window, summed over them.

        Returns:
            float32 [B, H, E]; 0 for the window and for empty places.

        Source: SnapKV, arXiv 2404.14469, section 4: softmax in float32 over all entries, the window included.
        """
        rows, heads, voters, width = self.queries_BHWD.shape
        kv_heads = self.entries.keys_BKED.shape[1]
        queries = self.queries_BHWD.reshape(rows, kv_heads, -1, width)  # [B, K, G W, D]
        logits = (queries @ self.entries.keys_BKED.transpose(2, 3)).float() * self.scaling
        logits = logits.view(rows, kv_heads, heads // kv_heads, voters, -1)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.entries.counts_BKE is not None:
            logits = logits + self.entries.counts_BKE.clamp(min=1).log()[:, :, None, None]
        seen = self.entries.positions_BKE[:, :, None, None] <= self.query_positions_BW[:, None, None, :, None]
        logits = logits.masked_fill(~(seen & ~self.empty_BKE[:, :, None, None]), -torch.inf)
        if self.sinks_H is not None:
            sink = self.sinks_H.float().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            # A query that is not there sees nothing; its softmax is nan and its vote 0.
            weights = logits.softmax(dim=-1).nan_to_num(0.0)
        votes = weights.sum(dim=3).masked_fill((self.protected_BKE | self.empty_BKE)[:, :, None], 0.0)
        return votes.flatten(1, 2)

    def by_kv_head(self, values_BHE: torch.Tensor) -> torch.Tensor:
        """Mean over the query heads of each KV head. [B, K, E]."""
        rows, _, places = values_BHE.shape
        return values_BHE.view(rows, self.entries.keys_BKED.shape[1], -1, places).mean(dim=2)

    def choose(self, score_BKE: torch.Tensor) -> torch.Tensor:
        """Exactly the budget: the window, then the best scores; of equals the earlier.

        Args:
            score_BKE: higher is kept rather; what it says of the window and of empty places is ignored.

        Returns:
            Index [B, K, N] for `Entries.take`, in the order of the input; -1, on the left, where a row's budget
            is smaller than that of another.
        """
        score = score_BKE.float().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max)
        score = score.masked_fill(self.protected_BKE, torch.inf).masked_fill(self.empty_BKE, -torch.inf)
        most = min(int(self.budget_B.max()), score.shape[-1])
        best_BKN = score.argsort(dim=-1, descending=True, stable=True)[..., :most]
        rank_N = torch.arange(most, device=score.device)
        over_B1N = (rank_N >= self.budget_B[:, None])[:, None]
        return best_BKN.masked_fill(over_B1N, -1).sort(dim=-1).values
