"""Attention over a compressed memory: gated window sums beside an exact local window and exact sinks.

Legend: B batch, T tokens, D model width, Q query heads, K KV heads, H head width, W window, E entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, eager_attention_forward, rotate_half

from isophase.models.chunks import LayerChunks
from isophase.models.compressor import WindowCompressor
from isophase.models.config import CompressedQwen3Config
from isophase.models.masks import block_bias
from isophase.models.memory import CompressedCache, CompressedLayer
from isophase.models.pages import PagedEntries

FEWEST_SEPARATE = 64
"""With fewer queries, as in decoding, a mask for every head costs less than a call for every group."""

Rotary = tuple[torch.Tensor, torch.Tensor]


def rotate(states_BKTH: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Apply rotary embedding to the first channels of every head; the rest pass.

    Args:
        states_BKTH: queries or keys.
        rotary: cosine and sine, each [B or 1, T, R], or [B or 1, K or 1, T, R]; R = 0 rotates nothing, R = H
            everything.
    """
    cos, sin = (part if part.dim() == 4 else part[:, None] for part in rotary)
    width = cos.shape[-1]
    turned, passed = states_BKTH[..., :width], states_BKTH[..., width:]
    half: torch.Tensor = rotate_half(turned)
    turned = turned * cos + half * sin
    return turned if width == states_BKTH.shape[-1] else torch.cat([turned, passed], dim=-1)


class CompressedAttention(nn.Module):
    """Qwen3 attention; with a grid, one softmax over [visible entries | exact tokens]."""

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
        self.q_norm, self.k_norm = (
            Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in "qk"
        )
        self.compressor = WindowCompressor(config) if config.compressed else None

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        rotary: Rotary,
        entry_rotary: Rotary | None,
        mask: Any,
        memory: CompressedCache | None,
        chunks: LayerChunks | None,
        keep: slice = slice(None),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from the new tokens.

        Args:
            hidden_BTD: normalised hidden states of the new tokens.
            rotary: cosine and sine for the new tokens.
            entry_rotary: cosine and sine at the anchors of newly closed entries, or None.
            mask: additive, [B or 1, G or 1, T, entries + exact tokens], for G groups of heads; or a `BlockMask`, with
                all tokens kept; or None where the kernel's causal order is all that is asked.
            memory: the cache, or None.
            chunks: what closes in this call, or None without compression.
            keep: new tokens whose output is wanted; the others are only remembered.

        Returns:
            Output [B, kept, D] and the attention weights (eager only).
        """
        shape = (*hidden_BTD.shape[:2], -1, self.head_dim)
        asking = hidden_BTD[:, keep]
        query = self.q_norm(self.q_proj(asking).view(*asking.shape[:2], -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_BTD).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_BTD).view(shape).transpose(1, 2)
        cos, sin = rotary
        query, key = rotate(query, (cos[:, keep], sin[:, keep])), rotate(key, rotary)

        mask = mask if mask is None or keep == slice(None) else mask[:, :, keep]
        if self.compressor is None:
            if memory is not None:
                key, value = memory.update(key, value, self.layer_idx)
            output, weights = self._attend(query, key, value, mask, chunks)
        else:
            assert entry_rotary is not None
            assert chunks is not None
            layer = memory.layers[self.layer_idx] if memory is not None else None
            assert layer is None or isinstance(layer, CompressedLayer)
            open_BTD = hidden_BTD if layer is None else layer.open_window(hidden_BTD)
            entry_key, entry_value = self._close(open_BTD, hidden_BTD.shape[1], entry_rotary, chunks)
            if layer is not None:
                key, value = layer.append(chunks, open_BTD, entry_key, entry_value, key, value)
            if layer is not None and self._few(query, layer.pages):
                output, weights = self._attend_in_place(query, layer.pages, key, value, mask)
            else:
                if layer is not None:
                    entry_key, entry_value = layer.pages.view()
                key, value = torch.cat([entry_key, key], dim=2), torch.cat([entry_value, value], dim=2)
                output, weights = self._attend(query, key, value, mask, chunks)
        return self.o_proj(output.reshape(*asking.shape[:2], -1).contiguous()), weights

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, chunks: LayerChunks | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [B, T, Q, H] and weights, by the implementation that the configuration names."""
        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        groups = mask.shape[1] if isinstance(mask, torch.Tensor) else 1
        if groups > 1 and query.shape[2] < FEWEST_SEPARATE:
            mask, groups = mask.repeat_interleave(query.shape[1] // groups, dim=1), 1
        how: dict[str, Any] = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        if self.config._attn_implementation == "flex_attention":
            how["position_bias"] = block_bias(chunks, query, key.shape[2])
        if groups == 1:
            return attend(self, query, key, value, mask, **how)
        split = zip(*(states.chunk(groups, dim=1) for states in (query, key, value, mask)), strict=True)
        outputs, by_group = zip(*(attend(self, *group, **how) for group in split), strict=True)
        return torch.cat(outputs, dim=2), None if by_group[0] is None else torch.cat(by_group, dim=1)

    def _few(self, query: torch.Tensor, pages: PagedEntries) -> bool:
        """Whether queries are multiplied with entries where these lie, as in decoding."""
        plain = self.config._attn_implementation in ("eager", "sdpa") and not self.training
        return plain and query.shape[2] < FEWEST_SEPARATE and not pages.shared

    def _attend_in_place(
        self, query: torch.Tensor, pages: PagedEntries, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same without a copy of the entries.

        Args:
            query: [B, Q, T, H].
            pages: all entries.
            key: of the exact tokens, [B, K, L, H].
            value: of the exact tokens.
            mask: additive, [B or 1, G or 1, T, E + L].
        """
        batch, _, tokens, width = query.shape
        heads = key.shape[1]
        query_BKRH = query.reshape(batch, heads, -1, width)
        products = torch.cat([pages.products(query_BKRH), query_BKRH @ key.transpose(2, 3)], dim=-1) * self.scaling
        scores = products.view(batch, mask.shape[1], -1, tokens, products.shape[3]) + mask[:, :, None]
        weights_BKRC = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype).view(products.shape)
        entries = pages.longest
        output_BKRH = weights_BKRC[..., entries:] @ value
        if entries:
            output_BKRH = output_BKRH + pages.mixed(weights_BKRC[..., :entries])
        output = output_BKRH.view(query.shape).transpose(1, 2)
        return output, weights_BKRC.view(*query.shape[:3], -1)

    def _close(
        self, open_BTD: torch.Tensor, new_tokens: int, entry_rotary: Rotary, chunks: LayerChunks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotary applied, and values of the entries that close, each [B, K, E, H].

        Args:
            open_BTD: states of open tokens, the new ones last.
            new_tokens: how many of them are new.
            entry_rotary: cosine and sine at the anchors.
            chunks: what closes.
        """
        assert self.compressor is not None
        if not chunks.layouts[0].entries:  # most steps of decoding
            none = open_BTD.new_zeros(len(open_BTD), self.compressor.keys.heads, 0, self.head_dim)
            return none, none
        first_token = chunks.past_tokens + new_tokens - open_BTD.shape[1]
        key, value = self.compressor(open_BTD, first_token, chunks)
        key = rotate(self.k_norm(key).transpose(1, 2), entry_rotary)
        value = value.transpose(1, 2)
        if chunks.confidence_BGE is not None:
            share = key.shape[1] // chunks.confidence_BGE.shape[1]
            sure_BKE1 = chunks.confidence_BGE.repeat_interleave(share, dim=1)[..., None].to(key.dtype)
            key, value = key * sure_BKE1, value * sure_BKE1
        return key, value
