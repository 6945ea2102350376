"""A compressed layer whose KV heads have budgets of their own.

Heads with equal budgets share one `CompressedLayer`, so that no memory is spent on padding: what is stored is what
was promised, to the byte. Attention is computed part by part.

Legend: B rows, K KV heads, E entries, T new tokens, L logical length, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from isophase.cache.methods.base import Method
from isophase.cache.runtime.layers import CompressedLayer
from isophase.cache.runtime.tokens import Tokens


class HeadGroups(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, in parts that hold equally many entries.

    Args:
        method: of the cache; every part has it with its own budget.
        budgets: entries of each KV head.
        tokens: shared by the layers of a cache.
        ordinal: number of the layer among the compressed ones.
        compressed_layers: how many there are.
    """

    is_croppable = False

    def __init__(
        self, method: Method, budgets: Sequence[int], tokens: Tokens, ordinal: int, compressed_layers: int
    ) -> None:
        super().__init__()
        heads: dict[int, list[int]] = {}
        for head, budget in enumerate(budgets):
            heads.setdefault(budget, []).append(head)
        self._parts: list[tuple[torch.Tensor, CompressedLayer]] = [
            (
                torch.tensor(mine),
                CompressedLayer(replace(method, budget=budget), tokens, ordinal, compressed_layers, first_head=mine[0]),
            )
            for budget, mine in heads.items()
        ]

    def parts(self) -> list[tuple[torch.Tensor | None, CompressedLayer]]:
        """As `AttentionUser.parts`."""
        return list(self._parts)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values, [B, K, T, D]; what was given is returned, for parts are not of one shape."""
        self.is_initialized = True
        if self._parts[0][0].device != key_states.device:
            self._parts = [(heads.to(key_states.device), part) for heads, part in self._parts]
        for heads, part in self._parts:
            part.update(key_states[:, heads], value_states[:, heads])
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Logical length in tokens."""
        return self._parts[0][1].get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `CompressedLayer.get_mask_sizes`."""
        return self._parts[0][1].get_mask_sizes(query_length)

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        for _, part in self._parts:
            part.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search."""
        for _, part in self._parts:
            part.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices`."""
        for _, part in self._parts:
            part.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        for _, part in self._parts:
            part.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, as `CompressedLayer.crop`."""
        self._parts[0][1].crop(tokens_to_remove)

    def adopt(self, other: CompressedLayer) -> None:
        """Take over what a recording layer has read, and compress it."""
        self.is_initialized = other.is_initialized
        self._parts = [(heads.to(other.keys.device), part) for heads, part in self._parts]
        for heads, part in self._parts:
            part.adopt(other, heads)

    def positions(self) -> torch.Tensor:
        """Place in the input of every entry, long [B, K, E]; -1, on the left, where a head has fewer than another."""
        return self._together([part.positions() for _, part in self._parts], -1)

    def counts(self) -> torch.Tensor | None:
        """Tokens merged into every entry, float32 [B, K, E]; None where every entry is one token."""
        if all(part.counts_BKP is None for _, part in self._parts):
            return None
        alone = [torch.ones_like(part.positions(), dtype=torch.float32) for _, part in self._parts]
        counts = [part.counts() for _, part in self._parts]
        return self._together([a if c is None else c for a, c in zip(alone, counts, strict=True)], 1)

    def _together(self, tensors: list[torch.Tensor], empty: int) -> torch.Tensor:
        """Values of all heads in their order, padded on the left to the longest."""
        most = max(t.shape[2] for t in tensors)
        padded = torch.cat([functional.pad(t, (most - t.shape[2], 0), value=empty) for t in tensors], dim=1)
        return padded[:, torch.cat([heads for heads, _ in self._parts]).argsort()]
