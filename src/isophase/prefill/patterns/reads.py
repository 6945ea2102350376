"""What one head reads, as patterns say it and plans carry it out.

Legend: S blocks of queries, Q all of them, N blocks of keys, U distances in blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from isophase.prefill.sample import Geometry


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


def at_least(pattern: object, **least: int) -> None:
    """Refuse a size below its least.

    Raises:
        ValueError: with the name, the value and the limit.
    """
    for name, value in least.items():
        if getattr(pattern, name) < value:
            raise ValueError(f"{name} is {getattr(pattern, name)}; give {value} or more")
