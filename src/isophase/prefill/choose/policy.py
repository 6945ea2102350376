"""Who decides what a head reads: the adaptive mode, one pattern for all heads, or a table by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from isophase.prefill.choose.adapt import Adaptive, Choice
from isophase.prefill.patterns import Dense, Pattern
from isophase.prefill.sample import HeadSample


class Policy(Protocol):
    """Decides for each head; asked from several threads at once."""

    def is_dense(self, layer: int, head: int) -> bool:
        """Whether the head is known to be dense, so that its queries need no look."""

    def choose(self, layer: int, head: int, sample: HeadSample) -> Choice:
        """What a head reads of one prompt."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The adaptive mode for every head.

    Attributes:
        mode: with its target.
    """

    mode: Adaptive

    def is_dense(self, layer: int, head: int) -> bool:
        """As `Policy.is_dense`: never known before."""
        return False

    def choose(self, layer: int, head: int, sample: HeadSample) -> Choice:
        """As `Policy.choose`."""
        return self.mode.choose(sample)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Patterns by layer and head; sizes are fixed, places are found for each prompt.

    Attributes:
        layers: for each layer a pattern for each query head; or one layer for all, or one pattern for all heads.
    """

    layers: Sequence[Sequence[Pattern]]

    def pattern(self, layer: int, head: int) -> Pattern:
        """Of one head."""
        heads = self.layers[0 if len(self.layers) == 1 else layer]
        return heads[0 if len(heads) == 1 else head]

    def is_dense(self, layer: int, head: int) -> bool:
        """As `Policy.is_dense`."""
        return isinstance(self.pattern(layer, head), Dense)

    def choose(self, layer: int, head: int, sample: HeadSample) -> Choice:
        """As `Policy.choose`."""
        pattern = self.pattern(layer, head)
        assert not isinstance(pattern, Dense), "a dense head needs no choice"
        reads = pattern.choose(sample)
        kept = float(sample.kept(reads.at(sample.block_V), len(reads.columns)).mean())
        return Choice(pattern=pattern, reads=reads, recall=kept, keys_per_query=reads.keys_per_query())
