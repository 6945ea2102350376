"""Exact attention of a few queries: what indices are estimated from, and what recall is measured on.

Legend: H query heads, T queries, L keys, D head width, S sampled queries, F those to fit on, V those to verify on,
C candidate columns, N blocks of keys, U distances in blocks of keys, Q blocks of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

_ROWS = 16
# Candidates among columns: at least so many, and a quarter of the keys. No pattern reads more.
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
    """

    last: int = 32
    spread: int = 32
    verify: int = 32
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


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Share of attention kept.

    Attributes:
        mean: over the verifying queries, 0..1.
        error: standard error of the mean.
    """

    mean: float
    error: float

    @property
    def low(self) -> float:
        """The mean less two standard errors; the smallest of many sizes that reach a target did so by luck, too."""
        return self.mean - 2 * self.error


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

    def recall(self, read_VN: torch.Tensor, columns: int, chosen_C: torch.Tensor | None = None) -> Recall:
        """Share of attention that a choice keeps.

        Args:
            read_VN: blocks that each verifying query's block reads, bool.
            columns: that so many of the best candidates are read.
            chosen_C: the candidates in blocks of keys, if known: `columns_C // key_tokens`.
        """
        kept_V = self.own_V + (self.block_VN * read_VN).sum(1)
        if columns:
            at_C = self.columns_C[:columns] // self.geometry.key_tokens if chosen_C is None else chosen_C[:columns]
            kept_V = kept_V + (self.column_VC[:, :columns] * ~read_VN[:, at_C]).sum(1)
        return Recall(
            mean=min(1.0, float(kept_V.mean())),
            error=float(kept_V.std()) / len(kept_V) ** 0.5 if len(kept_V) > 1 else 0.0,
        )


def attention_rows(
    query_SD: torch.Tensor, key_LD: torch.Tensor, positions_S: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention of single queries over all keys.

    Args:
        query_SD: queries.
        key_LD: keys.
        positions_S: position of each query.
        scaling: factor of the logits.

    Returns:
        Softmax in float32, [S, L]; 0 after each query.
    """
    rows_SL = torch.zeros(len(query_SD), len(key_LD), device=query_SD.device)
    scaled_SD = query_SD * scaling
    for first in range(0, len(query_SD), _ROWS):
        # A few rows at a time stay in cache, and see no further than the last of them.
        positions = positions_S[first : first + _ROWS].tolist()
        end = max(positions) + 1
        logits = (scaled_SD[first : first + _ROWS] @ key_LD[:end].T).float()
        for row, position in enumerate(positions):
            logits[row, position + 1 :] = -torch.inf
        rows_SL[first : first + _ROWS, :end] = logits.softmax(dim=-1)
    return rows_SL


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
    both = torch.cat([fit_F, verify_V])
    rows_SL = attention_rows(query_TD[both - geometry.first_query], key_LD, both, scaling)
    fit_FL, verify_VL = rows_SL[: len(fit_F)], rows_SL[len(fit_F) :]
    tokens, device = geometry.tokens, geometry.device

    key_L = torch.arange(tokens, device=device)
    readers_L = (len(fit_F) - torch.searchsorted(fit_F, key_L)).float()  # queries at or after each key
    total_L = fit_FL.sum(0)
    # Prior readers: a column near the end has few, and one of them should not make it look precious.
    worth_L = (total_L - fit_FL.amax(0)) / (readers_L - 1).clamp(min=1).add_(2)
    most = min(tokens, max(_COLUMNS, tokens // 4))
    worth_C, columns_C = worth_L.topk(most)

    own_V, block_VN, column_VC = _verify(verify_VL, verify_V, columns_C, geometry)
    strong = columns_C[worth_C > 1 / tokens]
    fit_FL[:, strong] = 0.0
    return HeadSample(
        geometry=geometry, query_TD=query_TD, key_LD=key_LD, scaling=scaling, columns_C=columns_C,
        column_worth_C=worth_C, slash_worth_U=_slash_worth(fit_FL, fit_F, geometry), block_VN=block_VN,
        own_V=own_V, column_VC=column_VC, verify_V=verify_V,
    )  # fmt: skip


def _verify(
    rows_VL: torch.Tensor, verify_V: torch.Tensor, columns_C: torch.Tensor, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention to the own block of queries, to blocks of keys before it, and to candidate columns before it."""
    first, size = geometry.first_query, geometry.query_tokens
    own = []
    for row, position in enumerate(verify_V.tolist()):
        start = first + (position - first) // size * size
        own.append(rows_VL[row, start : position + 1].sum())
        rows_VL[row, start:] = 0.0
    pad = geometry.key_blocks * geometry.key_tokens - geometry.tokens
    wide = torch.nn.functional.pad(rows_VL, (0, pad)) if pad else rows_VL
    block_VN = wide.view(len(wide), -1, geometry.key_tokens).sum(-1)
    return torch.stack(own), block_VN, rows_VL[:, columns_C]


def _slash_worth(rows_FL: torch.Tensor, fit_F: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Worth of each distance, from sums along exact diagonals.

    A query at slot r of its block reads, in the block of keys at distance u, diagonals u g + r - x for x in 0..g-1.
    So a distance earns the mean over r, and the sum over x, of the diagonals: two box filters.
    """
    tokens, size, width = geometry.tokens, geometry.query_tokens, geometry.key_tokens
    # Every row is put so that its own diagonal ends at the same place: one addition for all of its diagonals. Rows
    # that follow each other, as the newest do, are put so by reading their table with a longer stride.
    sums = torch.zeros(tokens, device=rows_FL.device)
    positions = fit_F.tolist()
    newest = next((n for n in range(len(positions)) if positions[n] == tokens - len(positions) + n), len(positions))
    for row, position in enumerate(positions[:newest]):
        sums[tokens - 1 - position :] += rows_FL[row, : position + 1]
    if newest < len(positions):
        count = len(positions) - newest
        wide = torch.nn.functional.pad(rows_FL[newest:], (count, 0))
        # Row r of the newest ends at position tokens - count + r: shifted right by count - 1 - r.
        shifted = wide.as_strided((count, tokens), (wide.stride(0) + 1, 1), 1)
        sums += shifted.sum(0)
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
