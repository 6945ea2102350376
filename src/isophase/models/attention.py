"""Attention over a compressed memory: gated window sums beside an exact local window.

Legend: B batch, T tokens, D model width, Q query heads, K KV heads, H head width, W window, E entries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from isophase.chunking.layout import FixedGrid
from isophase.models.config import CompressedQwen3Config
from isophase.models.memory import CompressedCache, CompressedLayer

Rotary = tuple[torch.Tensor, torch.Tensor]


class WindowBranch(nn.Module):
    """Entries of one kind, keys or values: `sum_i softmax_i(Z_i h_i + b_i) C_i h_i` over a window's slots.

    Gate and payload parameters belong to the offset `i`; the gate is one scalar per KV head.

    Source: Zhu et al., arXiv 2609.36322, scalar gates with separate key and value branches.
    """

    def __init__(self, config: CompressedQwen3Config, grid: FixedGrid) -> None:
        super().__init__()
        heads, width = config.num_key_value_heads, config.head_dim
        self.heads, self.head_width = heads, width
        self.payload_WDC = nn.Parameter(torch.empty(grid.window_tokens, config.hidden_size, heads * width))
        self.gate_WDK = nn.Parameter(torch.empty(grid.window_tokens, config.hidden_size, heads))
        self.gate_bias_WK = nn.Parameter(torch.zeros(grid.window_tokens, heads))

    def forward(self, windows_BEWD: torch.Tensor, filled_EW: torch.Tensor) -> torch.Tensor:
        """Entries of the given windows.

        Args:
            windows_BEWD: hidden states, windows aligned at their last slot.
            filled_EW: bool, False where a slot lies before the first token.

        Returns:
            [B, E, K, H].
        """
        B, E, W, D = windows_BEWD.shape
        # One matrix product per offset: [W, B*E, D] x [W, D, *].
        slots = windows_BEWD.reshape(B * E, W, D).transpose(0, 1)
        gates_WNK = torch.bmm(slots, self.gate_WDK) + self.gate_bias_WK[:, None, :]
        gates_BEWK = gates_WNK.transpose(0, 1).view(B, E, W, self.heads)
        gates_BEWK = gates_BEWK.masked_fill(~filled_EW[None, :, :, None], float("-inf"))
        weights = torch.softmax(gates_BEWK.float(), dim=2).to(windows_BEWD.dtype)
        payload = torch.bmm(slots, self.payload_WDC).transpose(0, 1).view(B, E, W, self.heads, self.head_width)
        return (weights[..., None] * payload).sum(dim=2)


class WindowCompressor(nn.Module):
    """Turns hidden states into the keys and values of closed entries."""

    def __init__(self, config: CompressedQwen3Config, grid: FixedGrid) -> None:
        super().__init__()
        self.grid = grid
        self.keys = WindowBranch(config, grid)
        self.values = WindowBranch(config, grid)

    def forward(self, open_BTD: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Close entries `first..last-1`.

        Args:
            open_BTD: hidden states that begin with the first window's overlap; where the overlap
                reaches before token 0 it is shorter, and the missing slots count as empty.
            first: index of the first entry to close.
            last: one past the last.

        Returns:
            Keys (no norm, no rotary yet) and values, each [B, E, K, H].
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
        return self.keys(windows_BEWD, filled_EW), self.values(windows_BEWD, filled_EW)


class CompressedAttention(nn.Module):
    """Qwen3 attention; with a grid, one softmax over [visible entries | exact local window]."""

    def __init__(self, config: CompressedQwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        grid = config.grid
        self.compressor = WindowCompressor(config, grid) if grid is not None else None

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        rotary: Rotary,
        entry_rotary: Rotary | None,
        mask: torch.Tensor,
        memory: CompressedCache | None,
        first_entry: int,
        last_entry: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from the new tokens.

        Args:
            hidden_BTD: normalised hidden states of the new tokens.
            rotary: cosine and sine for the new tokens.
            entry_rotary: cosine and sine at the anchors of newly closed entries, or None.
            mask: additive, broadcastable to [B, Q, T, entries + local tokens].
            memory: the cache, or None.
            first_entry: index of the first entry that closes in this call.
            last_entry: one past the last.

        Returns:
            Output [B, T, D] and the attention weights (eager only).
        """
        shape = (*hidden_BTD.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_BTD).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_BTD).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_BTD).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)

        if self.compressor is None:
            if memory is not None:
                key, value = memory.update(key, value, self.layer_idx)
        else:
            assert entry_rotary is not None
            layer = memory.layers[self.layer_idx] if memory is not None else None
            assert layer is None or isinstance(layer, CompressedLayer)
            open_BTD = hidden_BTD if layer is None else layer.open_window(hidden_BTD)
            entry_key, entry_value = self.compressor(open_BTD, first_entry, last_entry)
            entry_key = self.k_norm(entry_key).transpose(1, 2)
            entry_key, _ = apply_rotary_pos_emb(entry_key, entry_key, *entry_rotary)
            entry_value = entry_value.transpose(1, 2)
            if layer is None:
                key = torch.cat([entry_key, key], dim=2)
                value = torch.cat([entry_value, value], dim=2)
            else:
                key, value = layer.append(open_BTD, entry_key, entry_value, key, value)

        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return self.o_proj(output.reshape(*hidden_BTD.shape[:2], -1).contiguous()), weights
