"""The compressed memory as a transformers cache: closed entries, open tokens, exact local window, exact sinks.

Legend: B batch, K KV heads, E entries, L local tokens, T new tokens, D model width, H head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from isophase.models.chunks import ChunkReader, ChunkState, LayerChunks
from isophase.models.pages import PagedEntries

if TYPE_CHECKING:
    from isophase.models.config import CompressedQwen3Config


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's memory. It reports the logical length and stores fewer entries.

    What is kept between calls: entries of closed chunks, ragged, in pages; the hidden states of tokens that
    a later entry may still read; the exact keys and values that a later query may still read, sinks always. Prefill in
    any split therefore gives the entries of one shot. While the past is recorded, nothing older is dropped
    until the next crop, so that the tokens read since then can be taken back.

    Args:
        open_tokens: most tokens that lie in no entry yet, with the overlap that their entry reads.
        exact_tokens: most exact tokens that a query reads, its own included, sinks aside.
        sink_tokens: first tokens that stay exact.
    """

    # Not `super().__init__()`: it would set `keys` and `values`, which are views here.
    def __init__(self, open_tokens: int, exact_tokens: int, sink_tokens: int = 0) -> None:
        self.open_tokens, self.exact_tokens, self.sink_tokens = open_tokens, exact_tokens, sink_tokens
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.cumulative_length = 0
        self.pages = PagedEntries()
        self.local_keys: torch.Tensor | None = None  # exact, [B, K, L, H]
        self.local_values: torch.Tensor | None = None
        self.sink_keys: torch.Tensor | None = None  # of sinks before the exact ones, [B, K, <= sink tokens, H]
        self.sink_values: torch.Tensor | None = None
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
        return torch.cat([_last(self.open_hidden, self.open_tokens, 1), hidden_BTD], dim=1)

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
            Keys and values of the exact tokens that the new queries may read, each [B, K, L, H]: sinks that are not
            among the newest `exact_tokens - 1 + T`, then those.
        """
        if entry_keys_BKEH.shape[2] or not self.is_initialized:
            self.pages.append(entry_keys_BKEH, entry_values_BKEH, chunks.filled_BGE)
        keys, values, new = keys_BKTH, values_BKTH, keys_BKTH.shape[2]
        if self.local_keys is not None:
            assert self.local_values is not None
            keys = torch.cat([self.local_keys, keys], dim=2)
            values = torch.cat([self.local_values, values], dim=2)
            if self.record_past:
                assert self.open_hidden is not None
                hidden_BTD = torch.cat([self.open_hidden, hidden_BTD[:, -new:]], dim=1)
        self.cumulative_length += new
        self.is_initialized = True
        self.local_keys, self.local_values, self.open_hidden = keys, values, hidden_BTD
        read = self.exact_tokens - 1 + new
        sinks = self._sinks(self.cumulative_length - read)
        if not self.record_past:
            self._trim()
        keys, values = _last(keys, read, 2), _last(values, read, 2)
        if sinks is not None:
            keys, values = torch.cat([sinks[0], keys], dim=2), torch.cat([sinks[1], values], dim=2)
        return keys, values

    def _sinks(self, before: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the sinks before a token, at least the first that is kept; None where there are none."""
        assert self.local_keys is not None
        assert self.local_values is not None
        more = min(self.sink_tokens, before) - (self.cumulative_length - self.local_keys.shape[2])
        if more <= 0:
            return None if self.sink_keys is None or self.sink_values is None else (self.sink_keys, self.sink_values)
        # `cat` copies also where there is one part: sinks keep no long prompt alive.
        keys, values = (
            torch.cat([part for part in (apart, kept[:, :, :more]) if part is not None], dim=2)
            for apart, kept in ((self.sink_keys, self.local_keys), (self.sink_values, self.local_values))
        )
        return keys, values

    def take_back(self, tokens: int, counts_BG: torch.Tensor | None) -> None:
        """Forget the newest tokens, then what is older than any later call can read.

        Args:
            tokens: how many, all of them read since the past is recorded or was last cropped.
            counts_BG: entries that each sequence had closed before them, [B or 1, G]; None: none of them closed one.
        """
        if counts_BG is not None:
            self.pages.truncate(counts_BG.expand(self.pages.counts_BG.shape))
        self.cumulative_length -= tokens
        if self.local_keys is not None and self.local_values is not None and self.open_hidden is not None:
            end = self.local_keys.shape[2] - tokens
            self.local_keys, self.local_values = self.local_keys[:, :, :end], self.local_values[:, :, :end]
            self.open_hidden = self.open_hidden[:, : self.open_hidden.shape[1] - tokens]
            self._trim()

    def _trim(self) -> None:
        """Drop what no later call can read."""
        assert self.local_keys is not None
        assert self.local_values is not None
        assert self.open_hidden is not None
        sinks = self._sinks(self.cumulative_length - (self.exact_tokens - 1))
        self.sink_keys, self.sink_values = sinks if sinks is not None else (None, None)
        self.local_keys = _last(self.local_keys, self.exact_tokens - 1, 2, alone=True)
        self.local_values = _last(self.local_values, self.exact_tokens - 1, 2, alone=True)
        self.open_hidden = _last(self.open_hidden, self.open_tokens, 1, alone=True)

    def stored_bytes(self) -> int:
        """Bytes of all tensors that this layer keeps between calls."""
        return self.pages.stored_bytes() + sum(t.untyped_storage().nbytes() for t in self._states().values())

    def _states(self) -> dict[str, torch.Tensor]:
        names = ("local_keys", "local_values", "sink_keys", "sink_values", "open_hidden")
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

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: those read since the past is recorded."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """Keep what a crop needs; from then on every crop, of 0 tokens too, drops what is older."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, unless nothing is to be removed: where chunks are is the whole cache's business."""
        if tokens_to_remove != 0:
            raise ValueError("a layer of a compressed memory cannot be cropped alone; crop the cache")


def _last(states: torch.Tensor, tokens: int, dim: int, alone: bool = False) -> torch.Tensor:
    """The last tokens of `states`, at most so many; alone: in a tensor that keeps no long prompt alive."""
    length = states.shape[dim]
    last = states.narrow(dim, max(0, length - tokens), min(tokens, length))
    # One token more, as in decoding, is cheaper kept than copied away.
    bytes_kept = last.numel() * last.element_size()
    token_bytes = bytes_kept // max(last.shape[dim], 1)
    return last.clone() if alone and last.untyped_storage().nbytes() > bytes_kept + token_bytes else last


class _Recorded(NamedTuple):
    """One call that can be taken back."""

    before: ChunkState | None
    ids_BT: torch.Tensor
    hidden_BTD: torch.Tensor | None
    reader: ChunkReader

    def select(self, rows: torch.Tensor) -> _Recorded:
        rows = rows.to(self.ids_BT.device)
        return self._replace(
            before=None if self.before is None else self.before.select(rows),
            ids_BT=self.ids_BT.index_select(0, rows),
            hidden_BTD=None if self.hidden_BTD is None else self.hidden_BTD.index_select(0, rows),
        )


class CompressedCache(Cache):  # type: ignore[misc]
    """A cache for `CompressedQwen3ForCausalLM`: one memory per layer, and where the text's chunks are.

    Attributes:
        chunks: boundaries, which all layers share; None before the first tokens.
    """

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__(
            layers=[
                CompressedLayer(config.open_tokens, config.exact_tokens, config.sink_tokens)
                if config.compressed
                else DynamicLayer()
                for _ in range(config.num_hidden_layers)
            ]
        )
        self.chunks: ChunkState | None = None
        self._recorded: list[_Recorded] = []

    def read_chunks(
        self, reader: ChunkReader, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None
    ) -> list[LayerChunks]:
        """Find the boundaries of new tokens; arguments and result as of `ChunkReader.read`."""
        if any(layer.record_past for layer in self.layers if isinstance(layer, CompressedLayer)):
            self._recorded.append(_Recorded(self.chunks, ids_BT, hidden_BTD, reader))
        layers, self.chunks = reader.read(ids_BT, hidden_BTD, self.chunks)
        return layers

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens.

        Args:
            tokens_to_remove: 0 or negative, as everywhere in transformers: -3 takes three back.

        Raises:
            ValueError: for tokens that were read before the past was recorded, or before the last crop; the memory
                is then unchanged.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 hands over a tensor
        if self.chunks is None:
            return super().crop(tokens_to_remove)  # type: ignore[no-any-return]
        recorded = sum(call.ids_BT.shape[1] for call in self._recorded)
        if not 0 <= -tokens_to_remove <= recorded:
            raise ValueError(
                f"a compressed memory cannot be cropped by {tokens_to_remove}: {recorded} tokens can be taken back, "
                "those read since the last crop while the past was recorded (activate_past_recording)"
            )
        counts: list[torch.Tensor] | None = None
        left = recorded + tokens_to_remove
        if tokens_to_remove:
            # The calls are read again up to the last token that stays: boundaries are cheap, and theirs alone.
            for call in self._recorded:
                tokens = min(left, call.ids_BT.shape[1])
                left -= tokens
                hidden = None if call.hidden_BTD is None else call.hidden_BTD[:, :tokens]
                _, self.chunks = call.reader.read(call.ids_BT[:, :tokens], hidden, call.before)
                counts = call.reader.counts(self.chunks)
                if not left:
                    break
        self._recorded = []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, CompressedLayer)
            layer.take_back(-tokens_to_remove, None if counts is None else counts[number])

    def _select_chunks(self, rows: torch.Tensor) -> None:
        if self.chunks is not None:
            self.chunks = self.chunks.select(rows)
        self._recorded = [call.select(rows) for call in self._recorded]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.chunks, self._recorded = None, []

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
            self._select_chunks(torch.arange(self.chunks.batch).repeat_interleave(repeats))
