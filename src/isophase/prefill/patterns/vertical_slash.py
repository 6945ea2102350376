"""Vertical-slash: the columns and the diagonals that sampled queries read most.

Source: MInference 1.0, arXiv 2407.02490, section 3. Where we differ: diagonals are chosen in blocks of keys, by what a
whole block of queries earns there; queries over the whole prompt vote beside the newest.

Legend: U distances in blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isophase.prefill.patterns.reads import Reads, SlashReads, at_least
from isophase.prefill.sample import HeadSample

# Always read: MInference forces the first 30 columns and the last 100 diagonals.
FIRST_COLUMNS, NEAREST_KEYS = 30, 100


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
        at_least(self, columns=0, slash_tokens=0)

    def choose(self, sample: HeadSample) -> Reads:
        """What this head reads."""
        worth_U = sample.slash_worth_U.clone()
        width = sample.geometry.key_tokens
        worth_U[: NEAREST_KEYS // width + 1] = torch.inf
        chosen_U = torch.zeros(len(worth_U), dtype=torch.bool, device=worth_U.device)
        chosen_U[worth_U.topk(min(len(worth_U), -(-self.slash_tokens // width))).indices] = True
        return SlashReads(geometry=sample.geometry, distances_U=chosen_U, columns=sample.best(self.columns))
