"""Moves keys to other positions, with the model's own rotary embedding.

Legend: B rows, K KV heads, N entries, D head width, R rotated part of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


def rotation_of(model: Any, attention: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """How this model turns a key when its position changes.

    Rotations add up, so a key at position i becomes one at position a by turning it a - i positions further:
    absolute positions, and with them padding, do not matter.

    Args:
        model: whose rotary embedding is used.
        attention: one of its attention modules, whose file says how the embedding is applied.

    Returns:
        A function of keys [B, K, N, D] and distances in positions [B, K, N], long, either sign.

    Raises:
        ValueError: if the model has no rotary embedding of the usual kind.
    """
    name = type(model).__name__
    embedding = next((m for n, m in model.named_modules() if n.split(".")[-1] == "rotary_emb"), None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if embedding is None or apply is None:
        raise ValueError(
            f"{name} has no rotary embedding that keys could be moved with; use a method that keeps keys as they are, "
            "such as ChunkKV"
        )
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        raise ValueError(
            f"{name} has one rotary embedding per kind of layer, which merging does not know; use ChunkKV or SnapKV"
        )
    if "dynamic" in str(getattr(embedding, "rope_type", "")) or "longrope" in str(getattr(embedding, "rope_type", "")):
        raise ValueError(f"{name} changes its rotary embedding with the length; use ChunkKV or SnapKV")
    scale = float(getattr(embedding, "attention_scaling", 1.0) or 1.0)

    def rotate(keys_BKND: torch.Tensor, by_BKN: torch.Tensor) -> torch.Tensor:
        rows, heads, entries, width = keys_BKND.shape
        flat = keys_BKND.reshape(rows, 1, heads * entries, width).float()
        cos, sin = embedding(flat, position_ids=by_BKN.reshape(rows, heads * entries))
        part = cos.shape[-1]
        _, turned = apply(flat[..., :part], flat[..., :part], cos / scale, sin / scale)
        whole = torch.cat([turned, flat[..., part:]], dim=-1)
        return whole.view_as(keys_BKND).to(keys_BKND.dtype)

    return rotate
