"""What turns the hidden states of a window into an entry: gates, payloads, and how slots share them.

Legend: B batch, T tokens, D model width, K KV heads, H head width, C = K * H, W slots of a window, S stride,
G groups of slots that share parameters (W, W / S or 1), E entries. Where rows do not differ, one stands for all.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from isophase.chunking.layout import ChunkLayout
from isophase.models.config import CompressedQwen3Config


class WindowBranch(nn.Module):
    """Entries of one kind, keys or values: `sum_i softmax_i(Z_i h_i + b_i) C_i h_i` over a window's slots.

    `slot_parameters` says which slots share `Z` and `C`: none (`offset`), those of the same stride block of
    the window (`series`, as in DeepSeek V4), or all (`shared`). The bias `b_i` always belongs to the slot. The
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
        self.post_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps) if config.post_norm else None

    def forward(self, windows_BEWD: torch.Tensor, filled_BEW: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Entries of the given windows.

        Args:
            windows_BEWD: hidden states; anything where a slot is empty.
            filled_BEW: bool, False where a slot is empty, [B or 1, E, W].
            heads: KV heads whose chunks these are.

        Returns:
            [B, E, K, H]; a window without tokens gives 0.
        """
        payload = self._project(windows_BEWD, self._of(self.payload_WDC, heads))
        payload = payload.view(*payload.shape[:-1], payload.shape[-1] // self.head_width, self.head_width)
        weights = self.weights(windows_BEWD, filled_BEW, heads).to(payload.dtype)
        entries: torch.Tensor = (weights * payload).sum(dim=2)
        return entries if self.post_norm is None else self.post_norm(entries)

    def weights(self, windows_BEWD: torch.Tensor, filled_BEW: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Gate weights of every slot; they sum to 1 over the slots that are filled.

        Returns:
            float32 [B, E, W, K, 1], or [B, E, W, K, H] for vector gates.
        """
        B, E, W, _ = windows_BEWD.shape
        count = len(range(*heads.indices(self.heads)))
        if self.gate_WDK is None:
            gates = windows_BEWD.new_zeros(B, E, W, count, 1)
        else:
            gates = self._project(windows_BEWD, self._of(self.gate_WDK, heads))
            if self.gate_bias_WK is not None:
                gates = gates + self._of(self.gate_bias_WK, heads)
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
        G = self.groups
        slots = windows_BEWD.reshape(B * E, G, W // G, D).transpose(0, 1).reshape(G, B * E * (W // G), D)
        out = torch.bmm(slots, parameters_GDC)
        C = parameters_GDC.shape[2]
        return out.view(G, B * E, W // G, C).transpose(0, 1).reshape(B, E, W, C)


class WindowCompressor(nn.Module):
    """Turns hidden states into the keys and values of closed entries.

    Attributes:
        grid: the fixed grid that all heads and layers share, or None.
    """

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__()
        self.grid = config.grid if config.grid_shift == "none" else None
        self.window_slots, self.overlap_tokens = config.window_slots, config.overlap_tokens
        self.keys = WindowBranch(config)
        self.values = None if config.tied_key_value else WindowBranch(config)

    def forward(
        self, open_BTD: torch.Tensor, first_token: int, layouts: tuple[ChunkLayout, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Close entries. Tied values are the keys, before norm and rotary.

        Args:
            open_BTD: hidden states from the first slot of the first window on, or from token 0.
            first_token: position of the first of them.
            layouts: chunks to close, one layout per group of KV heads, with equally many entries.

        Returns:
            Keys (no Q/K norm, no rotary yet) and values, each [B, E, K, H].
        """
        share = self.keys.heads // len(layouts)
        keys, values = [], []
        for group, layout in enumerate(layouts):
            heads = slice(group * share, (group + 1) * share) if len(layouts) > 1 else slice(None)
            windows_BEWD, filled_BEW = self._windows(open_BTD, first_token, layout)
            keys.append(self.keys(windows_BEWD, filled_BEW, heads))
            values.append(keys[-1] if self.values is None else self.values(windows_BEWD, filled_BEW, heads))
        if len(layouts) == 1:
            return keys[0], values[0]
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def _windows(
        self, open_BTD: torch.Tensor, first_token: int, layout: ChunkLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position_BEW, filled_BEW = layout.slots(self.window_slots, self.overlap_tokens)
        index = (position_BEW - first_token).clamp(0, max(open_BTD.shape[1] - 1, 0))
        rows, entries, slots = index.shape
        if rows == 1:
            picked = open_BTD.index_select(1, index.flatten())
        else:
            picked = open_BTD.gather(1, index.view(rows, -1, 1).expand(-1, -1, open_BTD.shape[2]))
        return picked.view(len(open_BTD), entries, slots, open_BTD.shape[2]), filled_BEW
