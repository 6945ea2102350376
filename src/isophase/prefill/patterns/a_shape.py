"""A-shape: the first and the nearest keys.

Source: MInference 1.0, arXiv 2407.02490, section 3.

Legend: S blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isophase.prefill.patterns.reads import BlockReads, Reads, at_least
from isophase.prefill.sample import Geometry, HeadSample


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
        at_least(self, first_tokens=1, local_tokens=1)

    def choose(self, sample: HeadSample) -> Reads:
        """What this head reads."""
        return BlockReads(geometry=sample.geometry, blocks_QN=self.blocks(sample.geometry, sample.geometry.starts_Q))

    def blocks(self, geometry: Geometry, starts_S: torch.Tensor) -> torch.Tensor:
        """Blocks of keys that blocks of queries with these starts read, bool [S, N]."""
        far_SN = geometry.distance_QN(starts_S)
        first_N = torch.arange(geometry.key_blocks, device=geometry.device) * geometry.key_tokens < self.first_tokens
        return (far_SN >= 0) & (first_N | (far_SN <= -(-self.local_tokens // geometry.key_tokens)))
