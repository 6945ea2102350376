"""The adaptive mode: for each head and prompt, the pattern and the size that keep enough attention at least cost.

All candidates are priced alike. At a price, vertical-slash reads every column and every distance whose worth per key
is at least that; block-sparse reads every window whose pooled share per key is; A-shape reads nearer keys only. The
price is lowered until the attention kept on queries that no index was fitted to reaches the target, less two standard
errors: cumulative mass, with one number to fit, and no luck with the queries that were drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

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
from isophase.prefill.sample import HeadSample, Recall

_PRICES = (1e-7, 1e-1)
_STEPS = 8
# Where vertical-slash reads less than this share of dense attention, looking further would cost what it could gain.
_GOOD_ENOUGH = 0.1
# How much less a column may be worth than a diagonal: its worth leaves out its largest reading, a diagonal's does not.
_LEANS = (4.0, 32.0)


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
        target_recall: share of attention to keep, above 0 and below 1.
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
        best = self._best([_vertical_slash(sample, lean) for lean in _LEANS])
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
        """The highest price at which the target is reached, by bisection of its logarithm."""
        low, high = map(log, _PRICES)
        best = None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            rung = ladder(exp(middle))
            if rung.recall.low >= self.target_recall:
                best, low = rung, middle
            else:
                high = middle
        return None if best is None else best.choice()


@dataclass(frozen=True, kw_only=True, eq=False)
class Rung:
    """One size of a pattern: what it keeps, and how to make it."""

    recall: Recall
    make: Callable[[], tuple[Pattern, Reads]]

    def choice(self) -> Choice:
        """The choice of this size."""
        pattern, reads = self.make()
        return Choice(pattern=pattern, reads=reads, recall=self.recall.mean, keys_per_query=reads.keys_per_query())


Ladder = Callable[[float], Rung]


def _vertical_slash(sample: HeadSample, lean: float) -> Ladder:
    """Sizes of vertical-slash; columns may be worth `lean` times less than diagonals."""
    geometry = sample.geometry
    falling = -sample.column_worth_C
    far_VN = geometry.distance_QN(geometry.starts_Q[sample.block_V])
    at_C = sample.columns_C // geometry.key_tokens
    near_VN, is_before_VN = far_VN.clamp(min=0), far_VN >= 0

    def rung(price: float) -> Rung:
        best = int(torch.searchsorted(falling, -price / lean, right=True))
        best = max(best, min(FIRST_COLUMNS, len(falling)))
        chosen_U = sample.slash_worth_U >= price

        def make() -> tuple[Pattern, Reads]:
            pattern = VerticalSlash(columns=best, slash_tokens=int(chosen_U.sum()) * geometry.key_tokens)
            return pattern, SlashReads(geometry=geometry, distances_U=chosen_U, columns=sample.best(best))

        return Rung(recall=sample.recall(chosen_U[near_VN] & is_before_VN, best, at_C), make=make)

    return rung


def _block_sparse(sample: HeadSample, window_tokens: int, overlap: int) -> Ladder:
    """Sizes of block-sparse. On the way only the blocks of verifying queries are looked at."""
    kind = BlockSparse(window_tokens=window_tokens, overlap=overlap)
    worth_QP = kind.shares(sample) / kind.stride_tokens
    worth_VP = worth_QP[sample.block_V]

    def rung(price: float) -> Rung:
        def make() -> tuple[Pattern, Reads]:
            chosen_QP = worth_QP >= price
            windows = max(1, round(float(chosen_QP.sum(1).float().mean())))
            reads = BlockReads(geometry=sample.geometry, blocks_QN=kind.spread(chosen_QP, sample.geometry))
            return BlockSparse(windows=windows, window_tokens=window_tokens, overlap=overlap), reads

        read_VN = kind.spread(worth_VP >= price, sample.geometry)
        return Rung(recall=sample.recall(read_VN, 0), make=make)

    return rung


def _a_shape(sample: HeadSample) -> Ladder:
    """Sizes of A-shape: at a price per key, one over it nearest keys cost one unit."""
    geometry = sample.geometry

    def rung(price: float) -> Rung:
        local = max(geometry.key_tokens, min(geometry.tokens, round(0.1 / price)))
        pattern = AShape(first_tokens=128, local_tokens=local)
        read_VN = pattern.blocks(geometry, geometry.starts_Q[sample.block_V])
        return Rung(recall=sample.recall(read_VN, 0), make=lambda: (pattern, pattern.choose(sample)))

    return rung
