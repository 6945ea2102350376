"""Exact attention of a few queries: what indices are estimated from, and what recall is measured on.

Legend: H query heads, T queries, L keys, D head width, S sampled queries, F those to fit on, V those to verify on,
C candidate columns, N blocks of keys, U distances in blocks of keys, Q blocks of queries, W keys up to a chunk's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from isophase.prefill.rows import Rows

# Candidates among columns: at least so many, and a quarter of the keys; of short prompts half of them. No pattern
# reads more.
_COLUMNS = 4096


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a prompt is cut into blocks.

    Attributes:
        tokens: L, keys.
        first_query: position of the first query.
        query_tokens: queries per block.
        key_tokens: keys per block.
        device: where tensors are made.
    """

    tokens: int
    first_query: int = 0
    query_tokens: int = 128
    key_tokens: int = 16
    device: torch.device | str = "cpu"

    @property
    def queries(self) -> int:
        """T."""
        return self.tokens - self.first_query

    @property
    def key_blocks(self) -> int:
        """N."""
        return -(-self.tokens // self.key_tokens)

    @cached_property
    def starts_Q(self) -> torch.Tensor:
        """Position of the first query of each block."""
        return torch.arange(self.first_query, self.tokens, self.query_tokens, device=self.device)

    def distance_QN(self, starts: torch.Tensor) -> torch.Tensor:
        """From blocks of queries that start at `starts` back to every block of keys, in blocks of keys."""
        blocks_N = torch.arange(self.key_blocks, device=self.device, dtype=torch.int32)
        return (starts // self.key_tokens).to(torch.int32)[:, None] - blocks_N


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which queries are looked at.

    Attributes:
        last: newest queries, as in MInference (arXiv 2407.02490, section 3.2), which takes 64.
        spread: queries spread over the prompt; columns that only the newest queries read are no surprise to them.
        verify: queries spread over the prompt on which recall is measured; indices are not fitted to them.
        seed: of the places.

    What a model loses, it loses on the few queries that copy from far away: too small a sample misses them.
    """

    last: int = 32
    spread: int = 96
    verify: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        if self.last < 1 or self.spread < 0 or self.verify < 1:
            raise ValueError(f"sampled queries are {self.last}, {self.spread} and {self.verify}; give 1, 0, 1 or more")

    @property
    def rows(self) -> int:
        """All of them."""
        return self.last + self.spread + self.verify

    def positions(self, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Places to fit on and to verify on, long, rising; of a short prompt, fewer.

        The prompt is cut into equal stretches with one place drawn in each, so every part of it is looked at. The
        same geometry and seed give the same places.
        """
        first, end = geometry.first_query, geometry.tokens
        generator = torch.Generator().manual_seed(self.seed)

        def spread(count: int, end: int) -> torch.Tensor:
            jitter = torch.rand(count, generator=generator, dtype=torch.float64)
            places = first + (torch.arange(count) + jitter) * ((end - first) / max(count, 1))
            places = places.long().clamp(max=max(end - 1, first))
            # Rising, and equal where a short prompt has fewer places than are asked for.
            return places[torch.cat([torch.ones(1, dtype=torch.bool), places.diff() > 0])[: len(places)]]

        newest = torch.arange(max(first, end - self.last), end)
        early = spread(self.spread, int(newest[0]))
        fit = torch.cat([early[early < newest[0]], newest])
        return fit.to(geometry.device), spread(self.verify, end).to(geometry.device)


def dependable_recall(kept_V: torch.Tensor) -> torch.Tensor:
    """One less the fourth power mean of what queries lose.

    It lies below the mean recall, and the more so, the more a few queries lose of theirs. At the same number of keys
    perplexity follows it more closely than the mean.

    Args:
        kept_V: share of attention kept, 0..1; queries in the last dimension.

    Returns:
        Without that dimension.
    """
    return 1 - (1 - kept_V).square().square().mean(-1).sqrt().sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadSample:
    """What one head's sampled queries read, summed up.

    Attributes:
        geometry: how the prompt is cut.
        query_TD: the head's queries, for estimates by pooling.
        key_LD: the keys that it reads.
        scaling: factor of the logits.
        columns_C: candidate columns, best first.
        column_worth_C: attention per reading query that each candidate earns, falling.
        slash_worth_U: attention per read key that blocks at each distance earn; distance 0 is the own block.
        block_VN: attention of each verifying query to each block of keys, own block of queries left out.
        own_V: attention of each verifying query to its own block of queries.
        column_VC: attention of each verifying query to each candidate; 0 in its own block.
        verify_V: positions of the verifying queries.
    """

    geometry: Geometry
    query_TD: torch.Tensor
    key_LD: torch.Tensor
    scaling: float
    columns_C: torch.Tensor
    column_worth_C: torch.Tensor
    slash_worth_U: torch.Tensor
    block_VN: torch.Tensor
    own_V: torch.Tensor
    column_VC: torch.Tensor
    verify_V: torch.Tensor

    @property
    def block_V(self) -> torch.Tensor:
        """Block of queries of each verifying query."""
        return (self.verify_V - self.geometry.first_query) // self.geometry.query_tokens

    def best(self, columns: int) -> torch.Tensor:
        """So many of the best candidates, rising; a tensor of their own."""
        return self.columns_C[:columns].sort().values

    def kept(self, read_VN: torch.Tensor, columns: int) -> torch.Tensor:
        """Share of its attention that a choice keeps for each verifying query, float32 [V], 0..1.

        Args:
            read_VN: blocks that each verifying query's block reads, bool.
            columns: that so many of the best candidates are read.
        """
        kept_V = self.own_V + (self.block_VN * read_VN).sum(1)
        if columns:
            at_C = self.columns_C[:columns] // self.geometry.key_tokens
            kept_V = kept_V + (self.column_VC[:, :columns] * ~read_VN[:, at_C]).sum(1)
        return kept_V.clamp(max=1.0)

    def kept_by_level(self, block_VN: torch.Tensor, column_C: torch.Tensor | None, levels: int) -> torch.Tensor:
        """As `kept`, for a ladder of ever larger choices at once, float32 [V, levels].

        Args:
            block_VN: level from which each block is read, long, 0..levels; `levels` is never.
            column_C: level from which each candidate is read, in the same way; None: never.
            levels: how many choices.
        """
        gain_VS = torch.zeros(len(self.own_V), levels + 1, device=self.own_V.device)
        gain_VS.scatter_add_(1, block_VN, self.block_VN)
        if column_C is not None:
            block_VN = block_VN.float()  # torch gathers numbers of 32 bits several times faster than integers
            at_C = self.columns_C // self.geometry.key_tokens
            for first in range(0, len(column_C), _COLUMNS):
                some = slice(first, first + _COLUMNS)
                gain_VS.index_add_(1, column_C[some], self.column_VC[:, some])
                # A column counts until its block is read as a whole.
                until_VC = torch.maximum(block_VN.index_select(1, at_C[some]), column_C[some].float())
                gain_VS.scatter_add_(1, until_VC.long(), -self.column_VC[:, some])
        return gain_VS[:, :levels].cumsum(1).add_(self.own_V[:, None]).clamp_(max=1.0)


def sample_head(
    query_TD: torch.Tensor,
    key_LD: torch.Tensor,
    geometry: Geometry,
    sampling: Sampling,
    *,
    scaling: float,
) -> HeadSample:
    """Look at a head's sampled queries.

    Worth is attention over cost: of a column, per query that comes after it; of a block at a distance, per key and
    query that has such a block. The largest single reading of a column is left out, since a diagonal crosses every
    column once. Strong columns are taken out before diagonals are summed, since they cross every diagonal.

    Args:
        query_TD: queries of one head.
        key_LD: keys that it reads.
        geometry: how the prompt is cut.
        sampling: which queries are looked at.
        scaling: factor of the logits.
    """
    fit_F, verify_V = sampling.positions(geometry)
    tokens, device = geometry.tokens, geometry.device
    fit = Rows(query_TD[fit_F - geometry.first_query], key_LD, fit_F, scaling, keep=True)

    total_L, largest_L = torch.zeros(tokens, device=device), torch.zeros(tokens, device=device)
    for _, rows_RW in fit:
        width = rows_RW.shape[1]
        total_L[:width] += rows_RW.sum(0)
        torch.maximum(largest_L[:width], rows_RW.amax(0), out=largest_L[:width])
    before_L = torch.bincount(fit_F, minlength=tokens).cumsum(0)
    readers_L = len(fit_F) - before_L.roll(1)  # queries at or after each key
    readers_L[0] = len(fit_F)
    # Prior readers: a column near the end has few, and one of them should not make it look precious.
    worth_L = (total_L - largest_L) / (readers_L - 1).clamp(min=1).add(2)
    worth_C, columns_C = worth_L.topk(min(max(1, tokens // 2), max(_COLUMNS, tokens // 4)))
    weak_L = (worth_L <= 1 / tokens).float()

    verify = Rows(query_TD[verify_V - geometry.first_query], key_LD, verify_V, scaling)
    own_V, block_VN, column_VC = _verify(verify, columns_C, geometry)
    return HeadSample(
        geometry=geometry, query_TD=query_TD, key_LD=key_LD, scaling=scaling, columns_C=columns_C,
        column_worth_C=worth_C, slash_worth_U=_slash_worth(fit, fit_F, weak_L, geometry), block_VN=block_VN,
        own_V=own_V, column_VC=column_VC, verify_V=verify_V,
    )  # fmt: skip


def _verify(rows: Rows, columns_C: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention to the own block of queries, to blocks of keys before it, and to candidate columns before it."""
    first, size, width, device = geometry.first_query, geometry.query_tokens, geometry.key_tokens, geometry.device
    own_V = torch.empty(len(rows), device=device)
    block_VN = torch.zeros(len(rows), geometry.key_blocks, device=device)
    column_VC = torch.empty(len(rows), len(columns_C), device=device)
    for at, rows_RW in rows:
        end, position_R = rows_RW.shape[1], rows.positions_S[at]
        start_R = first + (position_R - first) // size * size
        # Past the end there is the last key: read twice, and 0 unless it is the own block's.
        own_RS = start_R[:, None] + torch.arange(size, device=device)
        seen_RS = own_RS < end
        own_RS.clamp_(max=end - 1)
        own_V[at] = (rows_RW.gather(1, own_RS) * seen_RS).sum(1)
        rows_RW.scatter_(1, own_RS, 0.0)
        whole = end // width
        block_VN[at, :whole] = rows_RW[:, : whole * width].reshape(len(rows_RW), whole, width).sum(-1)
        if whole * width < end:
            block_VN[at, whole] = rows_RW[:, whole * width :].sum(1)
        column_VC[at] = rows_RW.index_select(1, columns_C.clamp(max=end - 1)) * (columns_C < end)
    return own_V, block_VN, column_VC


def _slash_worth(rows: Rows, fit_F: torch.Tensor, weak_L: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Worth of each distance, from sums along exact diagonals, strong columns left out.

    A query at slot r of its block reads, in the block of keys at distance u, diagonals u g + r - x for x in 0..g-1.
    So a distance earns the mean over r, and the sum over x, of the diagonals: two box filters.
    """
    tokens, size, width = geometry.tokens, geometry.query_tokens, geometry.key_tokens
    # Every row is put so that its own diagonal ends at the same place: one addition for all of its diagonals.
    sums = torch.zeros(tokens, device=geometry.device)
    for at, rows_RW in rows:
        for row, position in enumerate(fit_F[at].tolist()):
            sums[tokens - 1 - position :].addcmul_(rows_RW[row, : position + 1], weak_L[: position + 1])
    diagonal_L = sums.flip(0).double()

    distances = geometry.key_blocks
    # Zeros around: diagonals below 0 do not exist, and those beyond the prompt read nothing.
    padded = torch.nn.functional.pad(diagonal_L, (width, distances * width + size - tokens + width))
    box_r = _box(padded, size)  # at y + width: the sum of diagonals y .. y + size - 1
    box_rx = _box(box_r, width)
    at_U = torch.arange(distances, device=sums.device) * width + 1  # the window of x ends at u g
    earned_U = box_rx[at_U] / size
    readers_U = (len(fit_F) - torch.searchsorted(fit_F, at_U - 1)).double()
    return (earned_U / (width * (readers_U + 2))).float()


def _box(values: torch.Tensor, size: int) -> torch.Tensor:
    """Sums of `size` neighbours, at the first of them."""
    sums = torch.nn.functional.pad(values.cumsum(0), (1, 0))
    return sums[size:] - sums[:-size]
