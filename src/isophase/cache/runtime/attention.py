"""One attention call on behalf of a compressed layer.

A cache layer is handed keys, but not the queries that vote on them. So when a compressed layer has taken new
keys, the attention function of that one call is set, by name, to `attend` below; the first thing that `attend`
does is to set it back. No module is patched, no hook stays, and no other model's attention changes.

Legend: B rows, H query heads, K KV heads, T new tokens, E entries, L logical length, D head width.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

ATTENTION = "isophase_cache"
# The last is `isophase.prefill`, which takes the masks of sdpa and hands what it does not read sparsely to sdpa.
SUPPORTED = ("sdpa", "eager", "isophase_prefill")
_CHOSEN = "_attn_implementation_internal"
_OTHERS = ("dropout", "softcap")  # what the model's own function does besides, or refuses to do


class AttentionPart(Protocol):
    """KV heads of a layer that hold the same number of entries."""

    keys: Any  # [B, K, E, D]
    values: Any

    @property
    def dropped(self) -> bool:
        """Whether anything was ever dropped."""

    def mask(self, query_BHTD: torch.Tensor, mask: torch.Tensor | None, name: str) -> torch.Tensor | None:
        """The mask over the layer's entries, from the model's mask over all inputs."""

    def attended(self, query_BHTD: torch.Tensor, mask: torch.Tensor | None, extra: dict[str, Any]) -> None:
        """The call is over: time to compress."""


class AttentionUser(Protocol):
    """A layer that takes part in an attention call."""

    def parts(self) -> Sequence[tuple[torch.Tensor | None, AttentionPart]]:
        """The layer's parts with their KV heads, long [heads]; one part with None where it has all heads."""


class _Waiting(threading.local):
    """The call that is being waited for, in each thread."""

    layer: AttentionUser | None = None
    config: Any = None
    name: str = ""


_waiting = _Waiting()


def arm(config: Any, layer: AttentionUser) -> None:
    """Route the next attention call of a model to `attend`.

    Args:
        config: the configuration that the layer's attention module asks for its attention function.
        layer: the layer that has just taken new keys.

    Raises:
        ValueError: if the model was set to another attention since its cache was made.
        RuntimeError: if the call of the layer before never came: the model does not use the attention interface.
    """
    if disarm():
        raise RuntimeError(
            "an attention layer did not call transformers' attention interface; this model's cache cannot be compressed"
        )
    chosen = vars(config)[_CHOSEN]
    if chosen not in SUPPORTED:
        raise ValueError(f"attention {chosen!r} cannot be compressed; set the model to 'sdpa' or 'eager'")
    # Not through the setter, which would change the configurations of other parts of the model as well; and not through
    # the attribute, whose lookups by other names take a fiftieth of the time of a token in a small model.
    _waiting.layer, _waiting.config, _waiting.name = layer, config, chosen
    vars(config)[_CHOSEN] = ATTENTION


def disarm() -> bool:
    """Set the attention function back; returns whether a call was being waited for."""
    if _waiting.layer is None:
        return False
    # Unless someone has set it since: an error may have ended the `with` block that the name belongs to.
    if vars(_waiting.config)[_CHOSEN] == ATTENTION:
        vars(_waiting.config)[_CHOSEN] = _waiting.name
    _waiting.layer = _waiting.config = None
    return True


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention over a compressed layer.

    Args:
        module: the attention module.
        query: [B, H, T, D], rotary applied.
        key: what the layer holds, [B, K, E, D]; of a layer with several parts only what it was just given.
        value: the same.
        attention_mask: the model's mask over all L inputs, or None.
        **kwargs: what the model passes on.

    Returns:
        What the attention function that the model is set to returns.

    Raises:
        ValueError: for a model with a position bias, whose keys have no position of their own.
    """
    layer, name = _waiting.layer, _waiting.name
    disarm()
    assert layer is not None, "attention was routed here without a layer"
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} adds a bias by position, which does not follow kept tokens; "
            "compression works for models with rotary embeddings"
        )
    if name == "eager":
        function = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    else:
        function = ALL_ATTENTION_FUNCTIONS[name]
    parts = layer.parts()
    if len(parts) == 1:
        return _attend(function, module, parts[0][1], query, attention_mask, name, kwargs)
    output_BTHD = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for heads, part in parts:
        assert heads is not None, "a part of several has heads of its own"
        mine = query_heads(heads, query.shape[1] // key.shape[1])
        own, _ = _attend(function, module, part, query[:, mine], attention_mask, name, kwargs)
        output_BTHD[:, :, mine] = own
    return output_BTHD, None


def _attend(
    function: Any,
    module: Any,
    part: AttentionPart,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    name: str,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    mask = part.mask(query, attention_mask, name)
    result: tuple[torch.Tensor, torch.Tensor | None]
    # Where nothing was dropped, the model's own function: results are then the full cache's to the bit.
    if part.dropped and name == "sdpa" and query.shape[2] == 1 and not any(kwargs.get(other) for other in _OTHERS):
        result = _one_token(query, part.keys, part.values, mask, kwargs.get("scaling")), None
    else:
        result = function(module, query, part.keys, part.values, mask, **kwargs)
    part.attended(query, attention_mask, kwargs)
    return result


def _one_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attention of one new token, [B, 1, H, D]: query heads of a KV head take the place of several tokens.

    The sums are those of the model's own function. That repeats keys and values for every query head, or has torch do
    so, which on a CPU takes five to seven times as long.
    """
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(rows, kv_heads, heads // kv_heads, -1)
    packed = query.reshape(rows, kv_heads, heads // kv_heads, width)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[3])


def query_heads(heads: torch.Tensor, group: int) -> torch.Tensor:
    """Query heads of some KV heads, of which each has `group`."""
    return (heads[:, None] * group + torch.arange(group, device=heads.device)).flatten()


# An entry under a name of ours; no existing function is replaced.
AttentionInterface.register(ATTENTION, attend)
