"""The contract of a method, and the budget that all methods share.

Legend: B rows, K KV heads, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from isophase.cache.methods.scene import Entries, Scene
from isophase.chunking import ChunkRule

__all__ = ["Method"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """Decides what a layer keeps. A method has no state; a cache may share it with others.

    A subclass says how much each entry matters (`score`); the window, ties, padding and the exact budget are
    handled for it. Exactly one of `budget`, `ratio` and `budget_bytes` is given.

    Attributes:
        budget: entries kept in each KV head: one number; one for each compressed layer; or, for each compressed
            layer, one for each of its KV heads, `((96, 32), (64, 64))`. A single inner tuple holds for all layers.
        ratio: share of a row's tokens that is kept, above 0 and at most 1; rounded down, at least one.
        budget_bytes: bytes of keys and values of one row over all compressed layers; rounded down to whole entries.
        window_tokens: newest tokens, which vote and are never dropped. Where a ratio or a number of bytes leaves
            less than twice the window, half of what it leaves is protected.
        every_tokens: compress again whenever this many tokens were decoded; None: tokens decoded after the prompt
            stay beside the budget.
        reuse_layers: neighbouring layers that share the choice of the first of them.

    Raises:
        ValueError: for a budget below the window, or a value out of range.
    """

    budget: int | Sequence[int] | Sequence[Sequence[int]] | None = None
    ratio: float | None = None
    budget_bytes: int | None = None
    window_tokens: int = 16
    every_tokens: int | None = None
    reuse_layers: int = 1

    def __post_init__(self) -> None:
        given = [v for v in (self.budget, self.ratio, self.budget_bytes) if v is not None]
        if len(given) != 1:
            raise ValueError(f"{len(given)} of budget, ratio and budget_bytes are given; give exactly one")
        if self.window_tokens < 1:
            raise ValueError(f"window_tokens {self.window_tokens} must be at least 1: its queries choose what is kept")
        for entries in self.every_budget:
            if entries < self.window_tokens:
                raise ValueError(
                    f"budget {entries} is below the window of {self.window_tokens} tokens, which is always kept; "
                    f"give a budget of at least {self.window_tokens}, or a smaller window_tokens"
                )
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise ValueError(f"ratio {self.ratio} must lie above 0 and at most at 1")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ValueError(f"budget_bytes {self.budget_bytes} must be at least 1")
        if self.every_tokens is not None and self.every_tokens < 1:
            raise ValueError(f"every_tokens {self.every_tokens} must be at least 1")
        if self.reuse_layers < 1:
            raise ValueError(f"reuse_layers {self.reuse_layers} must be at least 1")
        if len({isinstance(entries, int) for entries in self.budgets or ()}) > 1:
            raise ValueError(f"budget {self.budget} mixes numbers and heads; give for every layer one, or one per head")
        if self.reuse_layers > 1 and len(set(self.budgets or ())) > 1:
            raise ValueError("layers that share a choice need one budget; leave reuse_layers at 1, or give one budget")
        if self.by_head and getattr(self, "share_heads", False):
            raise ValueError(
                "heads that share a choice need one budget; leave share_heads at False, or give one budget"
            )

    @property
    def compresses(self) -> bool:
        """Whether anything is ever dropped."""
        return True

    @property
    def records(self) -> bool:
        """Whether the newest queries are kept for compression later."""
        return False

    @property
    def melts(self) -> bool:
        """Whether tokens become entries together, after the whole forward pass, instead of being dropped by layer."""
        return False

    @property
    def grid_tokens(self) -> int | None:
        """Stride of the fixed grid that the method cuts texts into; None where there is none."""
        return None

    @property
    def needs_attention(self) -> bool:
        """Whether attention received is taken down while a part is read."""
        return False

    @property
    def needs_votes(self) -> bool:
        """Whether queries are read."""
        return True

    @property
    def needs_rotation(self) -> bool:
        """Whether keys are moved to another position."""
        return False

    @property
    def chunk_rule(self) -> ChunkRule | None:
        """The rule over token ids that the method's chunks follow, or None."""
        return None

    @property
    def budgets(self) -> tuple[int | tuple[int, ...], ...] | None:
        """Entries by layer (and head), or the one value for all layers; None for ratios and bytes."""
        if self.budget is None:
            return None
        if isinstance(self.budget, int):
            return (self.budget,)
        return tuple(entries if isinstance(entries, int) else tuple(entries) for entries in self.budget)

    @property
    def by_head(self) -> bool:
        """Whether KV heads have budgets of their own."""
        return any(isinstance(entries, tuple) for entries in self.budgets or ())

    @property
    def every_budget(self) -> tuple[int, ...]:
        """All numbers in `budget`."""
        nested = [(entries,) if isinstance(entries, int) else entries for entries in self.budgets or ()]
        return tuple(entries for layer in nested for entries in layer)

    def head_budgets(self, ordinal: int) -> tuple[int, ...] | None:
        """Entries of each KV head of a layer; None where all heads have one budget."""
        if not self.by_head:
            return None
        assert self.budgets is not None
        heads = self.budgets[ordinal if len(self.budgets) > 1 else 0]
        assert isinstance(heads, tuple)
        return heads

    def entries(self, tokens: int, ordinal: int, entry_bytes: int) -> int:
        """Entries that a row may keep in each KV head of a layer whose heads have one budget.

        Args:
            tokens: tokens of the row so far, pads not counted.
            ordinal: number of the layer among the compressed ones.
            entry_bytes: bytes of one entry in every KV head of every compressed layer.

        Raises:
            ValueError: if the bytes do not hold one entry.
        """
        if self.budgets is not None:
            entries = self.budgets[ordinal if len(self.budgets) > 1 else 0]
            assert isinstance(entries, int), "heads with budgets of their own have methods of their own"
            return entries
        if self.ratio is not None:
            # By decimal digits: 50 * 0.1 is 5 here, where 50 * (1 - 0.9) in binary rounds down to 4.
            return max(1, int(Fraction(repr(self.ratio)) * tokens))
        assert self.budget_bytes is not None
        if self.budget_bytes < entry_bytes:
            raise ValueError(
                f"budget_bytes {self.budget_bytes} is less than one entry in all layers and heads, {entry_bytes} bytes"
            )
        return self.budget_bytes // entry_bytes

    def window(self, entries: int) -> int:
        """Newest tokens that are protected within a budget of `entries`."""
        return self.window_tokens if self.budgets is not None else min(self.window_tokens, max(1, entries // 2))

    def score(self, scene: Scene) -> torch.Tensor:
        """How much each entry matters, float [B, K, E]; of entries with equal scores the earlier is kept rather."""
        raise NotImplementedError

    def compress(self, scene: Scene) -> tuple[Entries, torch.Tensor | None]:
        """What is kept.

        Returns:
            The entries, and the index [B, K, N] by which they were chosen, which other layers may reuse; None
            where they were not chosen but made.
        """
        index_BKN = scene.choose(self.score(scene))
        return scene.entries.take(index_BKN), index_BKN
