"""The adaptive mode: for each head and prompt, the pattern and the size that keep enough attention at least cost.

All candidates are priced alike. At a price, vertical-slash reads every column and every distance whose worth per key
is at least that; block-sparse reads every window whose pooled share per key is; A-shape reads nearer keys only. The
price is lowered until the attention kept on queries that no index was fitted to reaches the target: cumulative mass,
with one number to fit. Queries that lose most count most (`dependable_recall`).

Legend: as in `isophase.prefill.sample`; P pooled windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch

from isophase.prefill.patterns import (
    FIRST_COLUMNS,
    AShape,
    BlockReads,
    BlockSparse,
    Dense,
    Pattern,
    Reads,
    SlashReads,
    VerticalSlash,
)
from isophase.prefill.sample import HeadSample, dependable_recall

# Prices on a ladder fall from level to level by one factor. A level of _LEVELS is never reached.
_PRICES, _LEVELS = (1e-7, 1e-1), 256
_STEP = log(_PRICES[1] / _PRICES[0]) / (_LEVELS - 1)
# Where vertical-slash reads less than this share of dense attention, looking further would cost what it could gain.
_GOOD_ENOUGH = 0.1
# How much less a column may be worth than a diagonal: its worth leaves out its largest reading, a diagonal's does not.
_LEANS = (4.0, 32.0)
# Of A-shape: keys at the start of the prompt, and what the key one step away is worth, which only sets the scale.
_FIRST_TOKENS, _NEAR_WORTH = 128, 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What was chosen for one head.

    Attributes:
        pattern: with sizes rounded to what this prompt took; `Dense` where nothing smaller reaches the target.
        reads: what is read; None where everything is.
        recall: share of attention kept on verifying queries, 0..1.
        keys_per_query: keys read before the own block of queries.
    """

    pattern: Pattern
    reads: Reads | None
    recall: float
    keys_per_query: float


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Picks pattern and size per head and prompt.

    Attributes:
        target_recall: share of attention to keep, above 0 and below 1, as `dependable_recall` measures it.
        window_tokens: of block-sparse.
        overlap: of block-sparse; 1 is the grid that dilutes facts at its edges.
    """

    target_recall: float = 0.95
    window_tokens: int = 64
    overlap: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.target_recall < 1:
            raise ValueError(f"target_recall is {self.target_recall}; give a share between 0 and 1, such as 0.95")

    def choose(self, sample: HeadSample) -> Choice:
        """The cheapest pattern that reaches the target on this head's sample."""
        dense = float(sample.geometry.starts_Q.double().mean())
        best = self._best(_vertical_slash(sample))
        if best is None or best.keys_per_query > dense * _GOOD_ENOUGH:
            others = [_block_sparse(sample, self.window_tokens, self.overlap), _a_shape(sample)]
            found = [choice for choice in (best, self._best(others)) if choice is not None]
            best = min(found, key=lambda choice: choice.keys_per_query, default=None)
        if best is None or best.keys_per_query >= dense:
            return Choice(pattern=Dense(), reads=None, recall=1.0, keys_per_query=dense)
        return best

    def _best(self, ladders: list[Ladder]) -> Choice | None:
        """The cheapest of several patterns."""
        found = [choice for ladder in ladders if (choice := self._cheapest(ladder)) is not None]
        return min(found, key=lambda choice: choice.keys_per_query, default=None)

    def _cheapest(self, ladder: Ladder) -> Choice | None:
        """The first level at which the target is reached."""
        kept_VS = ladder.sample.kept_by_level(ladder.block_VN, ladder.column_C, _LEVELS)
        reached_S = dependable_recall(kept_VS.T) >= self.target_recall
        if not bool(reached_S.any()):
            return None
        level = int(reached_S.int().argmax())
        pattern, reads = ladder.make(level)
        kept = float(kept_VS[:, level].mean())
        return Choice(pattern=pattern, reads=reads, recall=kept, keys_per_query=reads.keys_per_query())


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladder:
    """A pattern at falling prices.

    Attributes:
        sample: of the head.
        block_VN: level from which each verifying query's block reads each block of keys, long.
        column_C: level from which it reads each candidate column; None: never.
        make: the pattern at a level, and what it reads.
    """

    sample: HeadSample
    block_VN: torch.Tensor
    column_C: torch.Tensor | None
    make: Callable[[int], tuple[Pattern, Reads]]


def _levels(worth: torch.Tensor) -> torch.Tensor:
    """The first level whose price is at most this worth, long."""
    return ((log(_PRICES[1]) - worth.log()) / _STEP).ceil_().clamp_(0, _LEVELS).long()


def _by_distance(sample: HeadSample, level_U: torch.Tensor) -> torch.Tensor:
    """Levels of distances as levels of blocks for each verifying query's block, [V, N]; never after it."""
    far_VN = sample.geometry.distance_QN(sample.geometry.starts_Q[sample.block_V])
    return level_U[far_VN.clamp(min=0)].masked_fill_(far_VN < 0, _LEVELS)


def _vertical_slash(sample: HeadSample) -> list[Ladder]:
    """Vertical-slash, with columns that may be worth less than diagonals by one factor or another."""
    geometry = sample.geometry
    slash_U = _levels(sample.slash_worth_U)
    block_VN = _by_distance(sample, slash_U)

    def ladder(lean: float) -> Ladder:
        column_C = _levels(sample.column_worth_C * lean)
        column_C[:FIRST_COLUMNS] = 0

        def make(level: int) -> tuple[Pattern, Reads]:
            columns, chosen_U = int((column_C <= level).sum()), slash_U <= level
            pattern = VerticalSlash(columns=columns, slash_tokens=int(chosen_U.sum()) * geometry.key_tokens)
            return pattern, SlashReads(geometry=geometry, distances_U=chosen_U, columns=sample.best(columns))

        return Ladder(sample=sample, block_VN=block_VN, column_C=column_C, make=make)

    return [ladder(lean) for lean in _LEANS]


def _block_sparse(sample: HeadSample, window_tokens: int, overlap: int) -> Ladder:
    """Block-sparse. On the way only the blocks of verifying queries are looked at."""
    kind = BlockSparse(window_tokens=window_tokens, overlap=overlap)
    worth_QP = kind.shares(sample) / kind.stride_tokens

    def make(level: int) -> tuple[Pattern, Reads]:
        chosen_QP = _levels(worth_QP) <= level
        windows = max(1, round(float(chosen_QP.sum(1).float().mean())))
        reads = BlockReads(geometry=sample.geometry, blocks_QN=kind.spread(chosen_QP, sample.geometry))
        return BlockSparse(windows=windows, window_tokens=window_tokens, overlap=overlap), reads

    block_VN = _levels(kind.spread(worth_QP[sample.block_V], sample.geometry))
    return Ladder(sample=sample, block_VN=block_VN, column_C=None, make=make)


def _a_shape(sample: HeadSample) -> Ladder:
    """A-shape: the nearer a block, the more it is worth."""
    geometry = sample.geometry
    near_U = torch.arange(geometry.key_blocks, device=geometry.device)
    level_U = _levels(_NEAR_WORTH / (near_U * geometry.key_tokens).clamp(min=1))

    def make(level: int) -> tuple[Pattern, Reads]:
        blocks = max(1, int((level_U <= level).sum()) - 1)
        pattern = AShape(first_tokens=_FIRST_TOKENS, local_tokens=blocks * geometry.key_tokens)
        return pattern, pattern.choose(sample)

    block_VN = _by_distance(sample, level_U)
    # Also where a block is not before its queries: none of their attention is counted there.
    block_VN[:, : -(-_FIRST_TOKENS // geometry.key_tokens)] = 0
    return Ladder(sample=sample, block_VN=block_VN, column_C=None, make=make)
