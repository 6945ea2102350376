"""The patterns of MInference, per head: A-shape, vertical-slash, block-sparse; and dense.

A pattern says how much to read. What to read is decided for each prompt from its sampled queries.
Source: MInference 1.0, arXiv 2407.02490, section 3. Where we differ: diagonals are chosen in blocks of keys, by what
a whole block of queries earns there; queries over the whole prompt vote beside the newest; block-sparse can pool
overlapping windows, so that a short fact at a window's edge is not diluted.

Legend: S sampled queries, L keys, D head width, Q blocks of queries, N blocks of keys, U distances in blocks of
keys, P pooled windows of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from isophase.prefill.sample import Geometry, HeadSample

# Always read by vertical-slash: MInference forces the first 30 columns and the last 100 diagonals.
FIRST_COLUMNS, NEAREST_KEYS = 30, 100


class Reads(Protocol):
    """What one head reads beside its own blocks of queries."""

    @property
    def columns(self) -> torch.Tensor:
        """Single keys, long, rising: always the best candidates of the head's sample."""

    def at(self, blocks_S: torch.Tensor) -> torch.Tensor:
        """Blocks of keys that some blocks of queries read, bool [S, N]."""

    def keys_per_query(self) -> float:
        """Keys read before the own block, mean over blocks of queries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlashReads:
    """Blocks at fixed distances, and columns.

    Attributes:
        geometry: how the prompt is cut.
        distances_U: chosen distances, bool.
        columns: single keys, rising.
    """

    geometry: Geometry
    distances_U: torch.Tensor
    columns: torch.Tensor

    def at(self, blocks_S: torch.Tensor) -> torch.Tensor:
        """As `Reads.at`."""
        far_SN = self.geometry.distance_QN(self.geometry.starts_Q[blocks_S])
        return self.distances_U[far_SN.clamp(min=0)] & (far_SN >= 0)

    def keys_per_query(self) -> float:
        """As `Reads.keys_per_query`; a column inside a chosen block is counted twice."""
        starts_Q, width = self.geometry.starts_Q, self.geometry.key_tokens
        near_U = torch.arange(len(self.distances_U), device=starts_Q.device) * width
        reach_U = len(starts_Q) - torch.searchsorted(starts_Q, near_U)
        keys = (reach_U * self.distances_U).sum() * width
        keys = keys + (len(starts_Q) - torch.searchsorted(starts_Q, self.columns)).sum()
        return float(keys) / len(starts_Q)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockReads:
    """Blocks of keys chosen for each block of queries.

    Attributes:
        geometry: how the prompt is cut.
        blocks_QN: chosen blocks, bool.
    """

    geometry: Geometry
    blocks_QN: torch.Tensor

    @property
    def columns(self) -> torch.Tensor:
        """As `Reads.columns`: none."""
        return torch.empty(0, dtype=torch.long, device=self.blocks_QN.device)

    def at(self, blocks_S: torch.Tensor) -> torch.Tensor:
        """As `Reads.at`."""
        return self.blocks_QN[blocks_S]

    def keys_per_query(self) -> float:
        """As `Reads.keys_per_query`."""
        return float(self.blocks_QN.sum()) * self.geometry.key_tokens / len(self.blocks_QN)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Read everything."""

    name: str = field(default="dense", init=False)


@dataclass(frozen=True, kw_only=True)
class AShape:
    """The first and the nearest keys, for every query.

    Attributes:
        first_tokens: keys from the start of the prompt.
        local_tokens: keys before each block of queries.
    """

    first_tokens: int = 128
    local_tokens: int = 1024
    name: str = field(default="a_shape", init=False)

    def __post_init__(self) -> None:
        _at_least(self, first_tokens=1, local_tokens=1)

    def choose(self, sample: HeadSample) -> Reads:
        """What this head reads."""
        return BlockReads(geometry=sample.geometry, blocks_QN=self.blocks(sample.geometry, sample.geometry.starts_Q))

    def blocks(self, geometry: Geometry, starts_S: torch.Tensor) -> torch.Tensor:
        """Blocks of keys that blocks of queries with these starts read, bool [S, N]."""
        far_SN = geometry.distance_QN(starts_S)
        first_N = torch.arange(geometry.key_blocks, device=geometry.device) * geometry.key_tokens < self.first_tokens
        return (far_SN >= 0) & (first_N | (far_SN <= -(-self.local_tokens // geometry.key_tokens)))


@dataclass(frozen=True, kw_only=True)
class VerticalSlash:
    """The columns and the diagonals that sampled queries read most.

    Attributes:
        columns: single keys that every query reads.
        slash_tokens: keys per query that are read along diagonals, in blocks at the same distance.
    """

    columns: int = 512
    slash_tokens: int = 1024
    name: str = field(default="vertical_slash", init=False)

    def __post_init__(self) -> None:
        _at_least(self, columns=0, slash_tokens=0)

    def choose(self, sample: HeadSample) -> Reads:
        """What this head reads."""
        worth_U = sample.slash_worth_U.clone()
        width = sample.geometry.key_tokens
        worth_U[: NEAREST_KEYS // width + 1] = torch.inf
        chosen_U = torch.zeros(len(worth_U), dtype=torch.bool, device=worth_U.device)
        chosen_U[worth_U.topk(min(len(worth_U), -(-self.slash_tokens // width))).indices] = True
        return SlashReads(geometry=sample.geometry, distances_U=chosen_U, columns=sample.best(self.columns))


@dataclass(frozen=True, kw_only=True)
class BlockSparse:
    """For each block of queries, the windows of keys whose mean key its mean query likes best.

    Attributes:
        windows: windows that each block of queries reads.
        window_tokens: keys that are pooled into one.
        overlap: windows that each key lies in. 1 is MInference's grid of blocks, which dilutes a fact that an edge
            cuts; with 2 or more, every fact of up to `window_tokens * (1 - 1 / overlap)` tokens lies whole in one.
    """

    windows: int = 16
    window_tokens: int = 64
    overlap: int = 2
    name: str = field(default="block_sparse", init=False)

    def __post_init__(self) -> None:
        _at_least(self, windows=1, window_tokens=1, overlap=1)
        if self.window_tokens % self.overlap:
            raise ValueError(f"overlap is {self.overlap}; give a divisor of the {self.window_tokens} tokens per window")

    def choose(self, sample: HeadSample) -> Reads:
        """What this head reads."""
        share_QP = self.shares(sample)
        best = share_QP.topk(min(self.windows, share_QP.shape[1])).indices
        chosen_QP = torch.zeros(share_QP.shape, dtype=torch.bool, device=share_QP.device).scatter_(1, best, True)
        blocks_QN = self.spread(chosen_QP & (share_QP > 0), sample.geometry)
        return BlockReads(geometry=sample.geometry, blocks_QN=blocks_QN)

    def shares(self, sample: HeadSample) -> torch.Tensor:
        """Softmax over windows before each block of queries, float32 [Q, P]; 0 for windows that it cannot read."""
        geometry = sample.geometry
        if self.stride_tokens % geometry.key_tokens:
            raise ValueError(
                f"windows every {self.stride_tokens} tokens do not fit blocks of {geometry.key_tokens} keys; "
                "give a multiple"
            )
        query_QD = _pool_blocks(sample.query_TD.float(), geometry.query_tokens)
        key_PD = _pool_windows(sample.key_LD.float(), self.window_tokens, self.stride_tokens)
        starts_P = torch.arange(len(key_PD), device=geometry.device) * self.stride_tokens
        logits_QP = (query_QD @ key_PD.T).mul_(sample.scaling)
        logits_QP = logits_QP.masked_fill(starts_P >= geometry.starts_Q[:, None], -torch.inf)
        return logits_QP.softmax(dim=-1).nan_to_num(0.0)

    @property
    def stride_tokens(self) -> int:
        """Keys from one window to the next."""
        return self.window_tokens // self.overlap

    def spread(self, window_QP: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """For each block of keys the largest value of the windows that it lies in, [Q, N]; of bools, whether any."""
        per_stride = self.stride_tokens // geometry.key_tokens
        pieces = -(-geometry.key_blocks // per_stride)
        read_QN = window_QP.new_zeros(len(window_QP), pieces)
        for shift in range(self.overlap):
            part = window_QP[:, : pieces - shift]
            into = read_QN[:, shift : shift + part.shape[1]]
            torch.maximum(into, part, out=into)
        return read_QN.repeat_interleave(per_stride, dim=1)[:, : geometry.key_blocks]


SparsePattern = AShape | VerticalSlash | BlockSparse
Pattern = Dense | SparsePattern
KINDS: dict[str, Callable[..., Pattern]] = {
    "dense": Dense, "a_shape": AShape, "vertical_slash": VerticalSlash, "block_sparse": BlockSparse,
}  # fmt: skip


def _at_least(pattern: object, **least: int) -> None:
    for name, value in least.items():
        if getattr(pattern, name) < value:
            raise ValueError(f"{name} is {getattr(pattern, name)}; give {value} or more")


def _pool_blocks(rows_TD: torch.Tensor, size: int) -> torch.Tensor:
    """Means of blocks of rows; the last may be shorter."""
    whole = len(rows_TD) // size * size
    means = rows_TD[:whole].reshape(-1, size, rows_TD.shape[1]).mean(1)
    return torch.cat([means, rows_TD[whole:].mean(0, keepdim=True)]) if whole < len(rows_TD) else means


def _pool_windows(rows_LD: torch.Tensor, size: int, stride: int) -> torch.Tensor:
    """Means of windows of `size` rows at every multiple of `stride`, which divides it; those at the end are shorter."""
    pieces = -(-len(rows_LD) // stride)
    pad = pieces * stride - len(rows_LD)
    sums_PD = torch.nn.functional.pad(rows_LD, (0, 0, 0, pad)).view(pieces, stride, -1).sum(1)
    total_PD = sums_PD.clone()
    for shift in range(1, min(size // stride, pieces)):
        total_PD[:-shift] += sums_PD[shift:]
    starts_P = torch.arange(pieces, device=rows_LD.device) * stride
    means_PD: torch.Tensor = total_PD / (len(rows_LD) - starts_P).clamp(max=size)[:, None]
    return means_PD
