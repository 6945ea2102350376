"""What turns the hidden states of a window into an entry: gates, payloads, and how slots share them.

Legend: B batch, T tokens, D model width, K KV heads, H head width, C = K * H, W slots of a window, S stride,
G groups of slots that share parameters (W, W / S or 1), E entries. Where rows do not differ, one stands for all.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from isophase.chunking import ChunkLayout, PackedPlan, segment_softmax, segment_sum
from isophase.models.chunks import LayerChunks
from isophase.models.config import CompressedQwen3Config

FEWEST_PACKED = 8
"""Fewer chunks are executed padded: sorting their tokens by slot costs more than the empty slots."""


class WindowBranch(nn.Module):
    """Entries of one kind, keys or values: `sum_i softmax_i(Z_i h_i + b_i) C_i h_i` over a window's slots.

    `slot_parameters` says which slots share `Z` and `C`: none (`offset`), those of the same stride block of
    the window (`series`, as in DeepSeek V4), or all (`shared`); or each slot adds matrices of its own, at first 0, to
    those of all (`both`). The bias `b_i` always belongs to the slot. The
    gate is one number per KV head (`scalar`), one per channel (`vector`), or absent (`uniform`: the mean).

    Source: Zhu et al., arXiv 2609.36322, scalar gates with separate key and value branches; DeepSeek V4's CSA
    for `series` and `vector`.
    """

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__()
        heads, width = config.num_key_value_heads, config.head_dim
        self.heads, self.head_width = heads, width
        slots = config.window_slots
        groups = {
            "offset": slots,
            "both": slots,
            "series": slots // (config.compression_stride or 1),
            "shared": 1,
        }[config.slot_parameters]
        self.groups = groups
        gate_channels = {"scalar": heads, "vector": heads * width, "uniform": 0}[config.gate]
        # The axis W of gate and payload is as long as there are groups; with `offset` that is the window.
        self.payload_WDC = nn.Parameter(torch.empty(groups, config.hidden_size, heads * width))
        self.gate_WDK: nn.Parameter | None = None
        self.gate_bias_WK: nn.Parameter | None = None
        if gate_channels:
            self.gate_WDK = nn.Parameter(torch.empty(groups, config.hidden_size, gate_channels))
            if config.gate_bias:
                self.gate_bias_WK = nn.Parameter(torch.zeros(slots, gate_channels))
        self.common_payload_DC: nn.Parameter | None = None
        self.common_gate_DK: nn.Parameter | None = None
        if config.slot_parameters == "both":
            self.common_payload_DC = nn.Parameter(torch.empty(config.hidden_size, heads * width))
            if gate_channels:
                self.common_gate_DK = nn.Parameter(torch.empty(config.hidden_size, gate_channels))
        self.post_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps) if config.post_norm else None

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Draw the matrices; biases, and own matrices beside common ones, are 0."""
        for own, common in (
            (self.payload_WDC, self.common_payload_DC),
            (self.gate_WDK, self.common_gate_DK),
        ):
            if own is not None:
                (own if common is None else common).normal_(0.0, std)
                if common is not None:
                    own.zero_()
        if self.gate_bias_WK is not None:
            self.gate_bias_WK.zero_()

    def payload(self) -> torch.Tensor:
        """What each group of slots applies, [G, D, C]."""
        return self.payload_WDC if self.common_payload_DC is None else self.payload_WDC + self.common_payload_DC

    def gate(self) -> torch.Tensor | None:
        """The same for gates, [G, D, K]; None where there are none."""
        if self.gate_WDK is None or self.common_gate_DK is None:
            return self.gate_WDK
        return self.gate_WDK + self.common_gate_DK

    def forward(self, windows_BEWD: torch.Tensor, filled_BEW: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Entries of the given windows.

        Args:
            windows_BEWD: hidden states; anything where a slot is empty. The last slots may be left out where all are
                empty.
            filled_BEW: bool, False where a slot is empty, [B or 1, E, W].
            heads: KV heads whose chunks these are.

        Returns:
            [B, E, K, H]; a window without tokens gives 0.
        """
        payload = self._project(windows_BEWD, self._of(self.payload()[: windows_BEWD.shape[2]], heads))
        payload = payload.view(*payload.shape[:-1], payload.shape[-1] // self.head_width, self.head_width)
        weights = self.weights(windows_BEWD, filled_BEW, heads).to(payload.dtype)
        entries: torch.Tensor = (weights * payload).sum(dim=2)
        return entries if self.post_norm is None else self.post_norm(entries)

    def packed(self, rows_RD: torch.Tensor, plan: PackedPlan, heads: slice = slice(None)) -> torch.Tensor:
        """The same entries from packed rows: one product per slot, no empty slots.

        Args:
            rows_RD: hidden states in the plan's rows.
            plan: of the chunks.
            heads: KV heads whose chunks these are.

        Returns:
            [N, K, H].
        """
        payload_WDC, gate_WDK = self._of(self.payload(), heads), self.gate()
        channels = payload_WDC.shape[-1]
        count = channels // self.head_width
        # Gates and payloads in one product: the rows are read once.
        parameters = payload_WDC
        if gate_WDK is not None:
            parameters = torch.cat([payload_WDC, self._of(gate_WDK, heads)], dim=-1)
        both_RC = self._project_packed(rows_RD, parameters, plan)
        payload_RC, gates_RC = both_RC[:, :channels], both_RC[:, channels:]
        if gate_WDK is None:
            gates_RC = rows_RD.new_zeros(plan.rows, count)
        elif self.gate_bias_WK is not None:
            bias_WK = self._of(self.gate_bias_WK, heads)
            rows = [s.stop - s.start for s in plan.slots()]
            gates_RC = gates_RC + bias_WK.repeat_interleave(torch.tensor(rows, device=bias_WK.device), dim=0)
        weights_RC = segment_softmax(gates_RC, plan.chunk_R, plan.chunks).to(rows_RD.dtype)
        weighted_RKH = payload_RC.view(plan.rows, count, self.head_width) * weights_RC.view(
            plan.rows, count, weights_RC.shape[1] // count
        )
        entries_NC = segment_sum(weighted_RKH.view(plan.rows, channels), plan.chunk_R, plan.chunks)
        entries = entries_NC.view(plan.chunks, count, self.head_width)
        return entries if self.post_norm is None else self.post_norm(entries)

    def _project_packed(self, rows_RD: torch.Tensor, parameters_GDC: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
        """Apply each group's matrix to the rows of its slots. [R, C]."""
        slots = (len(plan.bounds) - 1) // self.groups
        edges = plan.bounds[::slots]
        parts = [
            rows_RD[first:last] @ own
            for first, last, own in zip(edges[:-1], edges[1:], parameters_GDC.unbind(), strict=True)
        ]
        return torch.cat(parts)

    def weights(self, windows_BEWD: torch.Tensor, filled_BEW: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Gate weights of every slot; they sum to 1 over the slots that are filled.

        Returns:
            float32 [B, E, W, K, 1], or [B, E, W, K, H] for vector gates.
        """
        B, E, W, _ = windows_BEWD.shape
        count = len(range(*heads.indices(self.heads)))
        gate_WDK = self.gate()
        if gate_WDK is None:
            gates = windows_BEWD.new_zeros(B, E, W, count, 1)
        else:
            gates = self._project(windows_BEWD, self._of(gate_WDK[:W], heads))
            if self.gate_bias_WK is not None:
                gates = gates + self._of(self.gate_bias_WK[:W], heads)
            gates = gates.view(B, E, W, count, gates.shape[-1] // count)
        # Not infinity: in padding a window has no token at all, and its weights must be numbers.
        gates = gates.float().masked_fill(~filled_BEW[..., None, None], torch.finfo(torch.float32).min)
        return torch.softmax(gates, dim=2) * filled_BEW.any(dim=2)[..., None, None, None]

    def _of(self, parameter: torch.Tensor, heads: slice) -> torch.Tensor:
        """The channels (last axis) that belong to some heads."""
        if heads == slice(None):
            return parameter
        each = parameter.shape[-1] // self.heads
        first, last, _ = heads.indices(self.heads)
        return parameter[..., first * each : last * each]

    def _project(self, windows_BEWD: torch.Tensor, parameters_GDC: torch.Tensor) -> torch.Tensor:
        """Apply each group's matrix to its slots, one batched product. [B, E, W, C]."""
        B, E, W, D = windows_BEWD.shape
        G = len(parameters_GDC)
        slots = windows_BEWD.reshape(B * E, G, W // G, D).transpose(0, 1).reshape(G, B * E * (W // G), D)
        out = torch.bmm(slots, parameters_GDC)
        C = parameters_GDC.shape[2]
        return out.view(G, B * E, W // G, C).transpose(0, 1).reshape(B, E, W, C)


class WindowCompressor(nn.Module):
    """Turns hidden states into the keys and values of closed entries.

    Attributes:
        grid: the fixed grid that all heads and layers share, or None.
        packed: whether windows are executed packed or padded; the result is the same.
    """

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__()
        self.grid = config.grid if config.grid_shift == "none" else None
        # Chunks of a fixed grid fill their windows: there is nothing to be packed.
        self.packed = config.chunk_rule != "fixed"
        self.window_slots, self.overlap_tokens = config.window_slots, config.overlap_tokens
        self.keys = WindowBranch(config)
        self.values = None if config.tied_key_value else WindowBranch(config)

    def forward(
        self, open_BTD: torch.Tensor, first_token: int, chunks: LayerChunks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Close entries. Tied values are the keys, before norm and rotary.

        Args:
            open_BTD: hidden states from the first slot of the first window on, or from token 0.
            first_token: position of the first of them.
            chunks: what closes, one layout per group of KV heads, with equally many entries.

        Returns:
            Keys (no Q/K norm, no rotary yet) and values, each [B, E, K, H].
        """
        groups = len(chunks.layouts)
        share = self.keys.heads // groups
        keys, values = [], []
        for group in range(groups):
            heads = slice(group * share, (group + 1) * share) if groups > 1 else slice(None)
            if not chunks.closing[group]:  # while decoding, groups seldom close together
                shape = (len(open_BTD), chunks.layouts[group].entries, share, self.keys.head_width)
                own = (open_BTD.new_zeros(shape), open_BTD.new_zeros(shape))
            elif self.packed and len(open_BTD) * chunks.layouts[group].entries >= FEWEST_PACKED:
                own = self._packed(open_BTD, first_token, chunks, group, heads)
            else:
                own = self._padded(open_BTD, first_token, chunks.layouts[group], heads)
            keys.append(own[0])
            values.append(own[1])
        if groups == 1:
            return keys[0], values[0]
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def _padded(
        self, open_BTD: torch.Tensor, first_token: int, layout: ChunkLayout, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference: windows of equal length, empty slots masked. Nothing is wasted where chunks are equal."""
        windows_BEWD, filled_BEW = self._windows(open_BTD, first_token, layout)
        keys = self.keys(windows_BEWD, filled_BEW, heads)
        return keys, keys if self.values is None else self.values(windows_BEWD, filled_BEW, heads)

    def _packed(
        self, open_BTD: torch.Tensor, first_token: int, chunks: LayerChunks, group: int, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with one row for every token of a chunk."""
        batch, length, width = open_BTD.shape
        plan = chunks.plan(group, batch, length, first_token, self.window_slots, self.overlap_tokens)
        rows_RD = open_BTD.reshape(batch * length, width).index_select(0, plan.token_R)
        keys = self.keys.packed(rows_RD, plan, heads)
        values = keys if self.values is None else self.values.packed(rows_RD, plan, heads)
        shape = (batch, chunks.layouts[group].entries, *keys.shape[1:])
        return keys.view(shape), values.view(shape)

    def _windows(
        self, open_BTD: torch.Tensor, first_token: int, layout: ChunkLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.window_slots
        if self.packed:  # no further than the longest chunk reaches
            slots = min(slots, self.overlap_tokens + int(layout.length_BE.max()))
        position_BEW, filled_BEW = layout.slots(slots, self.overlap_tokens)
        index = (position_BEW - first_token).clamp(0, max(open_BTD.shape[1] - 1, 0))
        rows, entries, _ = index.shape
        batch, length, width = open_BTD.shape
        if rows == 1:
            picked = open_BTD.index_select(1, index.flatten())
        else:
            # As one long table: its backward pass adds whole rows, which `gather` does number by number.
            first_B11 = torch.arange(batch, device=index.device)[:, None, None] * length
            picked = open_BTD.reshape(batch * length, width).index_select(0, (index + first_B11).flatten())
        return picked.view(batch, entries, slots, width), filled_BEW
