"""A cache layer that evicts.

Legend: B rows, H query heads, K KV heads, E entries, T new tokens, L logical length, W voting queries, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from isophase.cache.methods.base import Method
from isophase.cache.methods.melted import Melted
from isophase.cache.methods.scene import Entries, Scene
from isophase.cache.runtime.attention import query_heads
from isophase.cache.runtime.melting import Melting, melt, received, sampled
from isophase.cache.runtime.tokens import Tokens

ROW_STATES = (
    "keys", "values", "positions_BKP", "counts_BKP", "sums_BKPS", "recent_BHWD", "recent_positions_BW",
)  # fmt: skip
NO_ROLLBACK = (
    "a compressed cache cannot be cropped: dropped tokens do not come back. Assisted generation and prompt lookup roll "
    "the cache back; leave out assistant_model, assistant_early_exit and prompt_lookup_num_tokens (plain generation), "
    "or give generate no cache of isophase (its own keeps everything)"
)


class CompressedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values. It reports the logical length and stores fewer entries.

    Keys keep the rotary position that they were computed with. The newest entries, up to the last compression,
    stand at the end in input order; what stands where before them is in `positions_BKP`.
    """

    is_croppable = False
    keys: Any  # [B, K, E, D]; None before the first tokens
    values: Any
    device: Any

    def __init__(
        self, method: Method, tokens: Tokens, ordinal: int, compressed_layers: int, first_head: int = 0
    ) -> None:
        super().__init__()
        self.method = method
        self.tokens = tokens
        self.ordinal = ordinal
        self.compressed_layers = compressed_layers
        self.first_head = first_head
        self.leads = ordinal == 0 and first_head == 0  # the first to read a token tells the others
        self._forget()

    def _forget(self) -> None:
        self.cumulative_length = 0
        self.compressed_at = 0
        self.extra: dict[str, Any] = {}  # of the last attention call: scaling, softcap, sinks
        self.positions_BKP: torch.Tensor | None = None  # int32; -1 for an empty place
        self.counts_BKP: torch.Tensor | None = None  # float32; only where entries were merged
        self.sums_BKPS: torch.Tensor | None = None  # float32; only where entries melt
        self.recent_BHWD: torch.Tensor | None = None  # only where decoding compresses
        self.recent_positions_BW: torch.Tensor | None = None

    # What transformers calls.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values; all that the layer holds is returned."""
        if self.leads:
            self.tokens.begin(key_states.shape[0], key_states.shape[2])
        self.cumulative_length += key_states.shape[2]
        held: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states)
        return held

    def get_seq_length(self) -> int:
        """Logical length in tokens, not the number of stored entries."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical sizes: masks are made over all inputs, and `mask` picks the entries' columns from them."""
        return self.cumulative_length + query_length, 0

    def reset(self) -> None:
        """Forget everything. transformers 5.17 zeroes the tensors and keeps their length; here they go."""
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search."""
        self.change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices`."""
        self.change_rows(lambda tensor: tensor[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of rows to every state."""
        for name in ROW_STATES:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, unless nothing is to be removed."""
        if tokens_to_remove != 0:
            raise ValueError(NO_ROLLBACK)

    # What `isophase.cache.runtime.attention` calls.

    def parts(self) -> list[tuple[torch.Tensor | None, CompressedLayer]]:
        """As `AttentionUser.parts`: one, of all heads."""
        return [(None, self)]

    def positions(self) -> torch.Tensor:
        """Place in the input of every entry, long [B, K, E]; -1 for an empty place."""
        rows, heads, held, _ = self.keys.shape
        first = 0 if self.positions_BKP is None else self.positions_BKP.shape[2]
        tail = torch.arange(self.cumulative_length - (held - first), self.cumulative_length, device=self.keys.device)
        tail_BKT = tail.expand(rows, heads, -1)
        return tail_BKT if self.positions_BKP is None else torch.cat([self.positions_BKP.long(), tail_BKT], dim=2)

    @property
    def dropped(self) -> bool:
        """Whether anything was ever dropped."""
        return self.positions_BKP is not None

    def counts(self) -> torch.Tensor | None:
        """Tokens merged into every entry, float32 [B, K, E]; None where every entry is one token."""
        if self.counts_BKP is None:
            return None
        missing = self.keys.shape[2] - self.counts_BKP.shape[2]
        return torch.nn.functional.pad(self.counts_BKP, (0, missing), value=1.0)

    def mask(self, query_BHTD: torch.Tensor, mask: torch.Tensor | None, name: str) -> torch.Tensor | None:
        """As `AttentionUser.mask`: columns of the entries, and the log-counts of merged ones.

        Args:
            query_BHTD: new queries.
            mask: [B or 1, 1, T, L], or None.
            name: attention function that will read it; `eager` adds, the others take bool.

        Returns:
            [B, H, T, E], or what was given where nothing was dropped, or None where everything is seen.
        """
        if self.positions_BKP is None:
            return mask
        new = query_BHTD.shape[2]
        full = mask is None and new == 1
        if full and self.counts_BKP is None and not self._has_empty:
            return None
        positions = self.positions()
        if mask is None:
            query_T = torch.arange(self.cumulative_length - new, self.cumulative_length, device=positions.device)
            seen = positions[:, :, None] <= query_T[:, None]
        else:
            allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            rows, heads, entries = positions.shape
            wide = allowed.expand(rows, 1, -1, -1).expand(-1, heads, -1, -1)
            seen = wide.gather(3, positions.clamp(min=0)[:, :, None].expand(-1, -1, new, entries))
        seen = seen & (positions >= 0)[:, :, None]
        group = query_BHTD.shape[1] // seen.shape[1]
        if name != "eager" and self.counts_BKP is None:
            return seen.repeat_interleave(group, dim=1)
        added = torch.zeros(seen.shape, dtype=query_BHTD.dtype, device=seen.device)
        if self.counts_BKP is not None:
            logs = self.counts_BKP.clamp(min=1).log().to(query_BHTD.dtype)
            added[..., : logs.shape[2]] += logs[:, :, None]
        added = added.masked_fill(~seen, torch.finfo(query_BHTD.dtype).min)
        return added.repeat_interleave(group, dim=1)

    def attended(self, query_BHTD: torch.Tensor, mask: torch.Tensor | None, extra: dict[str, Any]) -> None:
        """As `AttentionUser.attended`: compress after every part of a prompt, and while decoding at the interval."""
        every = self.method.every_tokens
        new = query_BHTD.shape[2]
        self.extra = {name: extra.get(name) for name in ("scaling", "softcap", "s_aux")}
        due = new > 1 or (every is not None and self.cumulative_length - self.compressed_at >= every)
        keeps_queries = every is not None or self.method.records
        if not due and not keeps_queries:
            return
        rows, logical = query_BHTD.shape[0], self.cumulative_length
        if self.leads and (due or mask is not None):
            self.tokens.observe(mask, rows, logical)
        queries, positions = self._voters(query_BHTD)
        if keeps_queries:
            self.recent_BHWD, self.recent_positions_BW = queries, positions
        if self.method.melts:
            if due and self.method.needs_attention:
                self._look(query_BHTD, queries, positions)
            return
        if due and self.method.compresses:
            self._compress(queries, positions)

    def adopt(self, other: CompressedLayer, heads: torch.Tensor | None = None) -> None:
        """Take over what a recording layer has read, in some KV heads or all, and compress it."""
        self.keys, self.values = other.keys, other.values
        self.device, self.dtype, self.is_initialized = other.device, other.keys.dtype, other.is_initialized
        self.cumulative_length, self.extra = other.cumulative_length, other.extra
        queries, positions = other.recent_BHWD, other.recent_positions_BW
        assert queries is not None, "nothing was recorded"
        assert positions is not None
        if heads is not None:
            voters = query_heads(heads, queries.shape[1] // self.keys.shape[1])
            self.keys, self.values, queries = self.keys[:, heads], self.values[:, heads], queries[:, voters]
        window = self.method.window_tokens
        queries, positions = queries[:, :, -window:], positions[:, -window:]
        if self.method.every_tokens is not None:
            self.recent_BHWD, self.recent_positions_BW = queries, positions
        if self.method.compresses:
            self._compress(queries, positions)

    # How it compresses.

    def _voters(self, query_BHTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest queries of real tokens, right-aligned, [B, H, W, D] and [B, W]; -1 where there are fewer."""
        rows, heads, new, width = query_BHTD.shape
        first = self.cumulative_length - new
        positions = torch.arange(first, first + new, device=query_BHTD.device).expand(rows, new)
        real = self._real()
        if real is not None:
            positions = positions.masked_fill(~real[:, first : first + new], -1)
        queries = query_BHTD
        if self.recent_BHWD is not None:
            assert self.recent_positions_BW is not None
            queries = torch.cat([self.recent_BHWD, queries], dim=2)
            positions = torch.cat([self.recent_positions_BW, positions], dim=1)
        if real is None:
            window = self.method.window_tokens
            return queries[:, :, -window:].clone(), positions[:, -window:]
        order = (positions >= 0).long().argsort(dim=1, stable=True)[:, -self.method.window_tokens :]
        wide = order[:, None, :, None].expand(-1, heads, -1, width)
        return queries.gather(2, wide), positions.gather(1, order)

    def _look(self, query_BHTD: torch.Tensor, newest_BHWD: torch.Tensor, newest_BW: torch.Tensor) -> None:
        """Take down who received attention, from queries of this part; while decoding, from the newest ones."""
        new = query_BHTD.shape[2]
        queries, positions = newest_BHWD, newest_BW
        if new > 1:
            rows, heads, _, width = query_BHTD.shape
            first, real = self.cumulative_length - new, self._real()
            real_BT = query_BHTD.new_ones(rows, new, dtype=torch.bool) if real is None else real[:, first:]
            at_BQ = sampled(real_BT)
            wide = at_BQ.clamp(min=0)[:, None, :, None].expand(-1, heads, -1, width)
            queries, positions = query_BHTD.gather(2, wide), torch.where(at_BQ >= 0, at_BQ + first, -1)
        held = Entries(
            keys_BKED=self.keys, values_BKED=self.values, positions_BKE=self._places(), counts_BKE=self.counts()
        )  # fmt: skip
        paid, asked = received(
            queries, positions, held, self._scaling(), self.extra.get("softcap"), self.extra.get("s_aux")
        )
        sums = self._sums()
        self.sums_BKPS = torch.stack([sums[..., 0], sums[..., 1] + paid, sums[..., 2] + asked], dim=-1)

    def _sums(self) -> torch.Tensor:
        """As `Entries.sums_BKES`, of everything held."""
        shape = self.keys.shape[:3]
        old = self.sums_BKPS if self.sums_BKPS is not None else self.keys.new_zeros(*shape[:2], 0, 3).float()
        new = old.new_zeros(*shape[:2], shape[2] - old.shape[2], 3)
        new[..., 0] = -1.0
        return torch.cat([old, new], dim=2)

    def _places(self) -> torch.Tensor:
        """As `positions`; pads are empty places."""
        positions = self.positions()
        if (real := self._real()) is None:
            return positions
        at = real[:, None].expand(-1, positions.shape[1], -1).gather(2, positions.clamp(min=0))
        return positions.masked_fill(~at, -1)

    def _scaling(self) -> float:
        return float(self.extra.get("scaling") or self.keys.shape[-1] ** -0.5)

    def melt(self, melting: Melting) -> None:
        """Let what has left the window melt, after a forward pass."""
        self.compressed_at = self.cumulative_length
        method = self.method
        assert isinstance(method, Melted)
        old = self._aligned(self._real(), self._sums())
        made = melt(old, method, melting)
        if made is old and self.positions_BKP is None:
            return  # nothing has melted yet: the model's own cache
        self._take_over(made)

    def _take_over(self, made: Entries) -> None:
        self.keys, self.values = made.keys_BKED, made.values_BKED
        self.positions_BKP = made.positions_BKE.to(torch.int32)
        self.counts_BKP, self.sums_BKPS = made.counts_BKE, made.sums_BKES
        self._has_empty = bool((made.positions_BKE < 0).any())

    def _real(self) -> torch.Tensor | None:
        """Which inputs are tokens, all of them so far; None where all are."""
        real = self.tokens.real_BL
        if real is not None and real.shape[1] < self.cumulative_length:
            real = torch.nn.functional.pad(real, (0, self.cumulative_length - real.shape[1]), value=True)
        return real

    def _compress(self, queries: torch.Tensor, query_positions: torch.Tensor) -> None:
        method, rows, logical = self.method, self.keys.shape[0], self.cumulative_length
        self.compressed_at = logical  # also where nothing is dropped: the interval must not depend on batch-mates
        real = self._real()
        tokens_B = [logical] * rows if real is None else real.sum(1).tolist()
        budgets = [method.entries(int(n), self.ordinal, self.entry_bytes()) for n in tokens_B]
        entries = self._aligned(real)
        held = entries.positions_BKE.shape[2]
        if held <= min(budgets):
            return
        device = self.keys.device
        group = self.ordinal // method.reuse_layers, self.first_head
        if group in self.tokens.reused:
            kept: Entries = entries.take(self.tokens.reused[group])
        else:
            scene = Scene(
                entries=entries,
                queries_BHWD=queries,
                query_positions_BW=query_positions,
                scaling=self._scaling(),
                softcap=self.extra.get("softcap"),
                sinks_H=self.extra.get("s_aux"),
                budget_B=torch.tensor(budgets, device=device),
                window_B=torch.tensor([method.window(n) for n in budgets], device=device),
                index_BL=self.tokens.index_BL(rows, logical, device),
                chunk_BL=self.tokens.chunk_BL(logical),
                rotate=self.tokens.rotate,
            )
            kept, index = method.compress(scene)
            if index is not None and method.reuse_layers > 1:
                self.tokens.reused[group] = index
        self._take_over(kept)

    def _aligned(self, real: torch.Tensor | None, sums: torch.Tensor | None = None) -> Entries:
        """Everything held, without padding, right-aligned."""
        positions = self.positions()
        entries = Entries(
            keys_BKED=self.keys, values_BKED=self.values, positions_BKE=positions, counts_BKE=self.counts(),
            sums_BKES=sums,
        )  # fmt: skip
        if real is None:
            return entries
        at = real[:, None].expand(-1, positions.shape[1], -1).gather(2, positions.clamp(min=0)) & (positions >= 0)
        most = int(at.sum(-1).max())
        order = at.long().argsort(dim=-1, stable=True)[..., -most:]
        return entries.take(order.masked_fill(~at.gather(2, order), -1))

    def entry_bytes(self) -> int:
        """Bytes of one entry in every KV head of every compressed layer."""
        width = self.keys.shape[-1] + self.values.shape[-1]
        return int(self.keys.shape[1] * width * self.keys.element_size() * self.compressed_layers)

    _has_empty = False
