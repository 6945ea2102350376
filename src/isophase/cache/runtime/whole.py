"""The cache made of compressed layers.

Legend: B rows, K KV heads, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from isophase.cache.methods.base import Method
from isophase.cache.methods.melted import Melted
from isophase.cache.runtime.attention import arm, disarm
from isophase.cache.runtime.heads import HeadGroups
from isophase.cache.runtime.layers import NO_ROLLBACK, ROW_STATES, CompressedLayer
from isophase.cache.runtime.melting import Melting
from isophase.cache.runtime.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one layer keeps.

    Attributes:
        layer: number of the model's layer.
        positions_BKE: place of each entry in the padded input, long; -1, on the left, for a place
            that a row or head with fewer entries leaves empty.
        counts_BKE: tokens merged into each entry, or None where every entry is one token.
    """

    layer: int
    positions_BKE: torch.Tensor
    counts_BKE: torch.Tensor | None


EVICTING = (CompressedLayer, HeadGroups)


class CompressedCache(Cache):  # type: ignore[misc]
    """A transformers cache whose full-attention layers are compressed. Made by `isophase.cache.compress`."""

    def __init__(self, layers: list[Any], configs: Sequence[Any], method: Method, tokens: Tokens) -> None:
        super().__init__(layers=layers)
        self.method = method
        self._configs = list(configs)
        self.tokens = tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; the attention call that follows is the compressed layer's."""
        held: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, EVICTING) and (self.method.compresses or self.method.records):
            arm(self._configs[layer_idx], layer)
        return held

    def forward_ended(self, hidden_BTD: torch.Tensor) -> None:
        """A forward pass is over: what has left the window melts, if the method is one that melts.

        Args:
            hidden_BTD: last states of the tokens that were read.
        """
        method, layers = self.method, [layer for _, layer in self.compressed_layers()]
        if not isinstance(method, Melted) or not layers:
            return
        self.tokens.hear(hidden_BTD)
        lead = layers[0]
        assert isinstance(lead, CompressedLayer)
        every = method.every_tokens
        new, since = hidden_BTD.shape[1], lead.cumulative_length - lead.compressed_at
        if new == 1 and (every is None or since < every):
            return
        if (melting := self._melting(method, lead)) is not None:
            for layer in layers:
                assert isinstance(layer, CompressedLayer)
                layer.melt(melting)

    def _melting(self, method: Melted, lead: CompressedLayer) -> Melting | None:
        """What all layers melt by; None while every token is in the window."""
        rows, logical, device = lead.keys.shape[0], lead.cumulative_length, lead.keys.device
        index_BL = self.tokens.index_BL(rows, logical, device)
        unit_BL = self.tokens.chunk_BL(logical)
        assert unit_BL is not None
        tokens_B = index_BL[:, -1] + 1
        entries_B = None
        window_B = torch.full_like(tokens_B, method.window_tokens)
        if method.hard_budget:
            entries = [method.entries(int(n), 0, lead.entry_bytes()) for n in tokens_B.tolist()]
            entries_B = torch.tensor(entries, device=device)
            window_B = torch.tensor([method.window(n) for n in entries], device=device)
        if bool((tokens_B <= window_B).all()):
            return None
        # A unit melts when all of its tokens have left the window.
        first_B = (tokens_B - window_B).clamp(min=0)
        reaches_BL = unit_BL >= unit_BL.gather(1, _place(index_BL, first_B)[:, None])
        frontier_B = torch.where(reaches_BL, index_BL, logical).amin(1)
        if entries_B is not None:
            full_B = tokens_B - frontier_B + method.sink_tokens >= entries_B
            frontier_B = torch.where(full_B, first_B, frontier_B)
        decided_B = self.tokens.decided_B if self.tokens.decided_B is not None else torch.zeros_like(tokens_B)
        self.tokens.decided_B = frontier_B
        information_BL = self.tokens.information_BL
        if information_BL is not None and method.sharp is not None:
            assert self.tokens.ids_BL is not None
            information_BL = information_BL + method.sharp.to(device)[self.tokens.ids_BL.long()]
        return Melting(
            index_BL=index_BL, unit_BL=unit_BL, information_BL=information_BL, entries_B=entries_B,
            decided_B=decided_B, frontier_B=frontier_B,
        )  # fmt: skip

    def activate_past_recording(self) -> None:
        """Refuse: whoever rolls a cache back announces it here, as assisted generation does before it reads anything.

        Raises:
            ValueError: always.
        """
        raise ValueError(NO_ROLLBACK)

    def reset(self) -> None:
        """Forget everything: the next text is read as by a new cache."""
        disarm()
        super().reset()
        self.tokens.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search."""
        super().reorder_cache(beam_idx)
        self.tokens.select(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices`."""
        super().batch_select_indices(indices)
        self.tokens.select(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self.tokens.select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def compressed_layers(self) -> list[tuple[int, CompressedLayer | HeadGroups]]:
        """The compressed layers that have read something, with their numbers in the model."""
        return [
            (n, layer) for n, layer in enumerate(self.layers) if isinstance(layer, EVICTING) and layer.is_initialized
        ]  # fmt: skip

    def _parts(self) -> list[CompressedLayer]:
        return [part for _, layer in self.compressed_layers() for _, part in layer.parts()]

    def stored_bytes(self) -> int:
        """Bytes of keys and values in the compressed layers."""
        return sum(t.numel() * t.element_size() for part in self._parts() for t in (part.keys, part.values))

    def index_bytes(self) -> int:
        """Bytes of everything else that compressed layers hold: positions, counts, queries kept for later votes."""
        states = [getattr(part, name) for part in self._parts() for name in ROW_STATES[2:]]
        return sum(t.numel() * t.element_size() for t in states if t is not None)

    def what_was_kept(self) -> list[Kept]:
        """Places in the input that each compressed layer keeps, by row and KV head."""
        return [
            Kept(layer=n, positions_BKE=layer.positions(), counts_BKE=layer.counts())
            for n, layer in self.compressed_layers()
        ]


def _place(index_BL: torch.Tensor, wanted_B: torch.Tensor) -> torch.Tensor:
    """Where each row's token of this number stands, [B]."""
    places_L = torch.arange(index_BL.shape[1], device=index_BL.device)
    return torch.where(index_BL >= wanted_B[:, None], places_L, index_BL.shape[1] - 1).amin(1)
