"""A memory in which tokens melt together instead of being dropped: every token counts, once.

The first tokens and the newest stay exact. In between, neighbours become one entry: its key and value are means of its
tokens', weighted by what they are worth, each key at its own rotary position; an entry of n tokens counts n times
(log n on its logit). What is worth much stays alone; runs of what is worth little melt together. With nothing to melt
the model is the original, to the last digit.

Legend: B rows, K KV heads, E entries held, N entries kept, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from isophase.cache.methods.base import Method
from isophase.chunking import Chain, ChunkRule, FixedStride, merge_neighbours

__all__ = ["Melted", "sharp_tokens"]

Worth = Literal["both", "information", "attention", "length"]


@dataclass(frozen=True, kw_only=True)
class Melted(Method):
    """Melts the tokens that say least, in every KV head by itself.

    It needs no question: what a token is worth is known once it is read. Give exactly one of `tokens_per_entry`,
    `budget` (one number), `ratio` and `budget_bytes`; the last three count sinks and window in, and are exact. Or give
    `units` alone: each becomes one entry.

    Attributes:
        tokens_per_entry: mean length of an entry between sinks and window, at least 1.
        units: rule whose chunks are never cut: they melt whole, and together. A hard budget is then kept, not always
            used up. None: every token is a unit.
        worth: what a token is worth: `information`: its own loss under the model when it was read, in nats (plus
            `sharp`); `attention`: what later queries of the same part paid to it, in times an even share; `both`: the
            product of the two; `length`: all alike.
        sharp: nats added to the information of each token id, [vocabulary]: see `sharp_tokens`. None: nothing.
        sink_tokens: first tokens, which stay exact because every query leans on them.
        window_tokens: newest tokens, which stay exact.
        most_tokens: longest entry, unless the budget asks for longer ones.
        every_tokens: tokens that are decoded before the next melting; None: what is decoded stays exact.
        part_tokens: whoever reads a long text for this memory reads it in parts of so many tokens: a part is attended
            to exactly until it ends, so the memory never holds more than its promise and one part.

    Raises:
        ValueError: for a budget without room between sinks and window, or a value out of range.

    Source: ours; log-count as in token merging (Bolya et al., arXiv 2210.09461), sinks as in StreamingLLM (arXiv
    2309.17453).
    """

    tokens_per_entry: float | None = None
    units: ChunkRule | None = None
    worth: Worth = "both"
    sharp: torch.Tensor | None = field(default=None, compare=False, repr=False)
    sink_tokens: int = 4
    window_tokens: int = 32
    most_tokens: int = 32
    every_tokens: int | None = 32
    part_tokens: int = 128

    def __post_init__(self) -> None:
        given = (self.tokens_per_entry, self.budget, self.ratio, self.budget_bytes)
        number = sum(v is not None for v in given)
        if number > 1 or (not number and self.units is None):
            raise ValueError(
                f"{number} of tokens_per_entry, budget, ratio and budget_bytes are given; give exactly one, or units "
                "alone, which then become one entry each"
            )
        if self.hard_budget:
            super().__post_init__()
        if self.tokens_per_entry is not None and not self.tokens_per_entry >= 1:
            raise ValueError(f"tokens_per_entry {self.tokens_per_entry} must be at least 1")
        if self.budget is not None and not isinstance(self.budget, int):
            raise ValueError(f"budget {self.budget}: all layers and heads melt to one number; give one")
        if self.worth not in ("both", "information", "attention", "length"):
            raise ValueError(f"worth {self.worth!r} must be both, information, attention or length")
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens {self.sink_tokens} must not be negative")
        if self.window_tokens < 1:
            raise ValueError(f"window_tokens {self.window_tokens} must be at least 1: the newest token is never melted")
        if self.part_tokens < 1:
            raise ValueError(f"part_tokens {self.part_tokens} must be at least 1")
        if self.most_tokens < 2:
            raise ValueError(f"most_tokens {self.most_tokens} must be at least 2")
        least = self.sink_tokens + self.window_tokens + 1
        if isinstance(self.budget, int) and self.budget < least:
            raise ValueError(
                f"budget {self.budget} leaves nothing between {self.sink_tokens} sinks and a window of "
                f"{self.window_tokens} tokens; give at least {least}, or a smaller window_tokens"
            )

    @property
    def hard_budget(self) -> bool:
        """Whether the number of entries is fixed, sinks and window included; older entries then melt on."""
        return any(v is not None for v in (self.budget, self.ratio, self.budget_bytes))

    @property
    def has_target(self) -> bool:
        """Whether units melt together."""
        return self.hard_budget or self.tokens_per_entry is not None

    @property
    def melts(self) -> bool:
        """Always."""
        return True

    @property
    def needs_votes(self) -> bool:
        """Attention is taken down while a part is read; no query has to be kept."""
        return False

    @property
    def chunk_rule(self) -> ChunkRule | None:
        """The rule of the units; where there is none, any: information belongs to token ids, which must be read."""
        return self.units if self.units is not None else _ONE_TOKEN

    @property
    def grid_tokens(self) -> int | None:
        """Stride of units on a fixed grid."""
        stride = self.units.stride_tokens if isinstance(self.units, FixedStride) else 1
        return stride if stride > 1 else None

    @property
    def needs_information(self) -> bool:
        """Whether the model's loss on every token is asked for."""
        return self.worth in ("both", "information")

    @property
    def needs_attention(self) -> bool:
        """Whether attention received is asked for."""
        return self.worth in ("both", "attention")

    def worth_of(self, information: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """What tokens are worth, float32, above 0.

        Args:
            information: nats, `sharp` included.
            attention: received, in times an even share.
        """
        if self.worth == "length":
            return torch.ones_like(information)
        said = information + _LEAST_NATS if self.needs_information else torch.ones_like(information)
        return said * (attention + _LEAST_SHARE) if self.needs_attention else said

    def groups(self, chain: Chain, unit_RU: torch.Tensor, entries_R: torch.Tensor) -> torch.Tensor:
        """Which entry each token, or older entry, goes into.

        Args:
            chain: what may melt, [R, U].
            unit_RU: unit of each, rising.
            entries_R: entries that a hard budget leaves for it; not read without one.

        Returns:
            Number of the entry, [R, U], rising from 0; -1 for empty places.
        """
        there_RU = chain.tokens_RU > 0
        pad = torch.nn.functional.pad
        starts = there_RU & (pad(~there_RU, (1, 0), value=True)[:, :-1] | (unit_RU != pad(unit_RU, (1, 0))[:, :-1]))
        number_RU = (starts.long().cumsum(1) - 1).masked_fill(~there_RU, -1)
        if not self.has_target:
            return number_RU
        units = chain.summed(number_RU, number_RU.shape[1])
        if self.tokens_per_entry is not None:
            entries_R = torch.ceil(chain.tokens_RU.sum(1) / self.tokens_per_entry).long()
        merged_RU = merge_neighbours(units, entries_R, most_tokens=self.most_tokens)
        return merged_RU.gather(1, number_RU.clamp(min=0)).masked_fill(~there_RU, -1)


_LEAST_NATS = 0.1
_LEAST_SHARE = 0.3
_ONE_TOKEN = FixedStride(stride_tokens=1)


def sharp_tokens(decode: Callable[[list[int]], str], vocabulary: int, *, nats: float = 6.0) -> torch.Tensor:
    """Nats for what must stay sharp however little it surprises: tokens that hold a digit.

    A digit of a code carries log 10 nats, less than many a harmless word, and is asked for more often.

    Args:
        decode: text of token ids.
        vocabulary: number of token ids.
        nats: added to such a token.

    Returns:
        float32 [vocabulary].
    """
    return torch.tensor([nats if any(c.isdigit() for c in decode([token])) else 0.0 for token in range(vocabulary)])
