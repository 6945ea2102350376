"""What turns the hidden states of a window into an entry: gates, payloads, and how slots share them.

Legend: B batch, T tokens, D model width, K KV heads, H head width, C = K * H, W slots of a window, S stride,
G groups of slots that share parameters (W, W / S or 1), E entries.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from isophase.chunking.layout import FixedGrid
from isophase.models.config import CompressedQwen3Config


class WindowBranch(nn.Module):
    """Entries of one kind, keys or values: `sum_i softmax_i(Z_i h_i + b_i) C_i h_i` over a window's slots.

    `slot_parameters` says which slots share `Z` and `C`: none (`offset`), those of the same stride block of
    the window (`series`, as in DeepSeek V4), or all (`shared`). The bias `b_i` always belongs to the slot. The
    gate is one number per KV head (`scalar`), one per channel (`vector`), or absent (`uniform`: the mean).

    Source: Zhu et al., arXiv 2609.36322, scalar gates with separate key and value branches; DeepSeek V4's CSA
    for `series` and `vector`.
    """

    def __init__(self, config: CompressedQwen3Config, grid: FixedGrid) -> None:
        super().__init__()
        heads, width = config.num_key_value_heads, config.head_dim
        self.heads, self.head_width = heads, width
        groups = {
            "offset": grid.window_tokens,
            "series": grid.window_tokens // grid.stride_tokens,
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
                self.gate_bias_WK = nn.Parameter(torch.zeros(grid.window_tokens, gate_channels))
        self.post_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps) if config.post_norm else None

    def forward(self, windows_BEWD: torch.Tensor, filled_EW: torch.Tensor) -> torch.Tensor:
        """Entries of the given windows.

        Args:
            windows_BEWD: hidden states, windows aligned at their last slot.
            filled_EW: bool, False where a slot lies before the first token.

        Returns:
            [B, E, K, H].
        """
        B, E, W, _ = windows_BEWD.shape
        payload = self._project(windows_BEWD, self.payload_WDC).view(B, E, W, self.heads, self.head_width)
        weights = self.weights(windows_BEWD, filled_EW).to(payload.dtype)
        entries = (weights * payload).sum(dim=2)
        return entries if self.post_norm is None else self.post_norm(entries)

    def weights(self, windows_BEWD: torch.Tensor, filled_EW: torch.Tensor) -> torch.Tensor:
        """Gate weights of every slot; they sum to 1 over the slots that are filled.

        Returns:
            float32 [B, E, W, K, 1], or [B, E, W, K, H] for vector gates.
        """
        B, E, W, _ = windows_BEWD.shape
        if self.gate_WDK is None:
            gates = windows_BEWD.new_zeros(B, E, W, self.heads, 1)
        else:
            gates = self._project(windows_BEWD, self.gate_WDK)
            if self.gate_bias_WK is not None:
                gates = gates + self.gate_bias_WK
            gates = gates.view(B, E, W, self.heads, gates.shape[-1] // self.heads)
        gates = gates.masked_fill(~filled_EW[None, :, :, None, None], float("-inf"))
        return torch.softmax(gates.float(), dim=2)

    def _project(self, windows_BEWD: torch.Tensor, parameters_GDC: torch.Tensor) -> torch.Tensor:
        """Apply each group's matrix to its slots, one batched product. [B, E, W, C]."""
        B, E, W, D = windows_BEWD.shape
        G = self.groups
        slots = windows_BEWD.reshape(B * E, G, W // G, D).transpose(0, 1).reshape(G, B * E * (W // G), D)
        out = torch.bmm(slots, parameters_GDC)
        C = parameters_GDC.shape[2]
        return out.view(G, B * E, W // G, C).transpose(0, 1).reshape(B, E, W, C)


class WindowCompressor(nn.Module):
    """Turns hidden states into the keys and values of closed entries."""

    def __init__(self, config: CompressedQwen3Config, grid: FixedGrid) -> None:
        super().__init__()
        self.grid = grid
        self.keys = WindowBranch(config, grid)
        self.values = None if config.tied_key_value else WindowBranch(config, grid)

    def forward(self, open_BTD: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Close entries `first..last-1`. Tied values are the keys, before norm and rotary.

        Args:
            open_BTD: hidden states that begin with the first window's overlap; where the overlap
                reaches before token 0 it is shorter, and the missing slots count as empty.
            first: index of the first entry to close.
            last: one past the last.

        Returns:
            Keys (no Q/K norm, no rotary yet) and values, each [B, E, K, H].
        """
        W, S = self.grid.window_tokens, self.grid.stride_tokens
        E = last - first
        # Token index of the first window's first slot; negative before the start of the text.
        origin = first * S - self.grid.overlap_tokens
        missing = max(0, -origin)
        needed = max(E * S + self.grid.overlap_tokens - missing, 0) if E else 0
        padded = nn.functional.pad(open_BTD[:, :needed], (0, 0, missing if E else 0, 0))
        if E:
            windows_BEWD = padded.unfold(1, W, S).transpose(2, 3)
        else:
            windows_BEWD = padded.new_zeros(padded.shape[0], 0, W, padded.shape[2])
        start_E1 = (torch.arange(first, last, device=open_BTD.device) * S - self.grid.overlap_tokens)[:, None]
        filled_EW = start_E1 + torch.arange(W, device=open_BTD.device) >= 0
        keys = self.keys(windows_BEWD, filled_EW)
        return keys, keys if self.values is None else self.values(windows_BEWD, filled_EW)
