"""The compressed memory as a transformers cache: closed entries, open tokens, exact local window.

Legend: B batch, K KV heads, E entries, L local tokens, T new tokens, D model width, H head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from isophase.models.chunks import ChunkState, LayerChunks
from isophase.models.pages import PagedEntries

if TYPE_CHECKING:
    from isophase.models.config import CompressedQwen3Config


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's memory. It reports the logical length and stores fewer entries.

    What is kept between calls: entries of closed chunks, ragged, in pages; the hidden states of tokens that
    a later entry may still read; the exact keys and values that a later query may still read. Prefill in
    any split therefore gives the entries of one shot.

    Args:
        open_tokens: most tokens that lie in no entry yet, with the overlap that their entry reads.
        exact_tokens: most exact tokens that a query reads, its own included.
    """

    is_croppable = False

    # Not `super().__init__()`: it would set `keys` and `values`, which are views here.
    def __init__(self, open_tokens: int, exact_tokens: int) -> None:
        self.open_tokens, self.exact_tokens = open_tokens, exact_tokens
        self._clear()

    def _clear(self) -> None:
        self.cumulative_length = 0
        self.pages = PagedEntries()
        self.local_keys: torch.Tensor | None = None  # exact, [B, K, L, H]
        self.local_values: torch.Tensor | None = None
        self.open_hidden: torch.Tensor | None = None  # [B, <= open tokens, D]
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor:
        """Keys of all entries, [B, K, E, H], padded to the longest sequence."""
        return self.pages.view()[0]

    @property
    def values(self) -> torch.Tensor:
        """Values of all entries, [B, K, E, H], padded to the longest sequence."""
        return self.pages.view()[1]

    def open_window(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Hidden states from the first that an unfinished entry may read to the newest. [B, *, D]."""
        if self.open_hidden is None:
            return hidden_BTD
        return torch.cat([self.open_hidden, hidden_BTD], dim=1)

    def append(
        self,
        chunks: LayerChunks,
        hidden_BTD: torch.Tensor,
        entry_keys_BKEH: torch.Tensor,
        entry_values_BKEH: torch.Tensor,
        keys_BKTH: torch.Tensor,
        values_BKTH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens and the entries that they closed.

        Args:
            chunks: which new entries are no padding.
            hidden_BTD: what `open_window` returned (old open tokens and the new ones).
            entry_keys_BKEH: keys of newly closed entries, rotary applied; E may be 0.
            entry_values_BKEH: their values.
            keys_BKTH: exact keys of the new tokens, rotary applied.
            values_BKTH: exact values of the new tokens.

        Returns:
            Keys and values to attend to: all entries, then the local tokens of every new query,
            [B, K, E + L, H]; L is at most `exact_tokens - 1 + T`.
        """
        entry_keys, entry_values = self.pages.append(entry_keys_BKEH, entry_values_BKEH, chunks.filled_BGE)
        keys, values = keys_BKTH, values_BKTH
        if self.local_keys is not None:
            assert self.local_values is not None
            keys = torch.cat([self.local_keys, keys], dim=2)
            values = torch.cat([self.local_values, values], dim=2)
        self.cumulative_length += keys_BKTH.shape[2]
        keep = min(self.exact_tokens - 1, keys.shape[2])
        # Copies: a slice would keep the tensors of the whole prompt alive.
        self.local_keys = keys[:, :, keys.shape[2] - keep :].clone()
        self.local_values = values[:, :, values.shape[2] - keep :].clone()
        self.open_hidden = hidden_BTD[:, max(0, hidden_BTD.shape[1] - self.open_tokens) :].clone()
        self.is_initialized = True
        return torch.cat([entry_keys, keys], dim=2), torch.cat([entry_values, values], dim=2)

    def stored_bytes(self) -> int:
        """Bytes of all tensors that this layer keeps between calls."""
        return self.pages.stored_bytes() + sum(t.numel() * t.element_size() for t in self._states().values())

    def _states(self) -> dict[str, torch.Tensor]:
        names = ("local_keys", "local_values", "open_hidden")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def _select(self, rows: torch.Tensor) -> None:
        self.pages.select(rows)
        for name, tensor in self._states().items():
            setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    # The rest is transformers' cache-layer interface.

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate before the first tokens arrive."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: a compressed memory needs hidden states, which this call does not carry."""
        raise TypeError("a compressed memory takes tokens through `append`; it cannot serve another model's attention")

    def get_seq_length(self) -> int:
        """Logical length in tokens, not the number of stored entries."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    # transformers 5.17 asks for the limit under the older name.
    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical sizes; the model builds its own mask over entries and local tokens."""
        return self.cumulative_length + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self._clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices`."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.local_keys is not None:
            rows = torch.arange(len(self.local_keys), device=self.local_keys.device)
            self._select(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, unless nothing is to be removed: closed entries cannot be reopened."""
        if tokens_to_remove != 0:
            raise ValueError("a compressed memory cannot be cropped: the tokens of closed entries are gone")


class CompressedCache(Cache):  # type: ignore[misc]
    """A cache for `CompressedQwen3ForCausalLM`: one memory per layer, and where the text's chunks are.

    Attributes:
        chunks: boundaries, which all layers share; None before the first tokens.
    """

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__(
            layers=[
                CompressedLayer(config.open_tokens, config.exact_tokens) if config.compressed else DynamicLayer()
                for _ in range(config.num_hidden_layers)
            ]
        )
        self.chunks: ChunkState | None = None

    def _select_chunks(self, rows: torch.Tensor) -> None:
        if self.chunks is not None:
            self.chunks = self.chunks.select(rows)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.chunks = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search."""
        super().reorder_cache(beam_idx)
        self._select_chunks(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices`."""
        super().batch_select_indices(indices)
        self._select_chunks(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.chunks is not None:
            rows = max(len(starts) for starts in self.chunks.open_starts)
            self._select_chunks(torch.arange(rows).repeat_interleave(repeats))
