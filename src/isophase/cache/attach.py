"""`compress`: a compressed cache for a model, or a refusal that says what would work.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from isophase.cache.methods.base import Method
from isophase.cache.methods.melted import Melted
from isophase.cache.runtime.attention import SUPPORTED
from isophase.cache.runtime.heads import HeadGroups
from isophase.cache.runtime.information import Surprise, logits_of
from isophase.cache.runtime.layers import CompressedLayer
from isophase.cache.runtime.rotation import rotation_of
from isophase.cache.runtime.tokens import Tokens
from isophase.cache.runtime.whole import CompressedCache

__all__ = ["OpenCache", "compress"]


class OpenCache(CompressedCache):
    """A compressed cache, for one batch of texts.

    Methods whose chunks follow the content read token ids through a hook on the model's input embedding. It goes
    when the cache goes, at the end of a `with` block, or with `close`; other methods put nothing on the model.
    """

    def __init__(self, layers: list[Any], configs: list[Any], method: Method, tokens: Tokens) -> None:
        super().__init__(layers, configs, method, tokens)
        self._finalizer: Any = None

    def listen(self, model: PreTrainedModel) -> None:
        """Read the ids that the model embeds; for a method that melts, also the states that it ends with."""
        tokens = weakref.ref(self.tokens)

        def read(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream, ids = tokens(), args[0] if args else kwargs.get("input")
            if stream is not None and isinstance(ids, torch.Tensor) and not ids.is_floating_point():
                stream.pending_BT = ids

        handles = [model.get_input_embeddings().register_forward_pre_hook(read, with_kwargs=True)]
        if self.method.melts:
            cache = weakref.ref(self)

            def ended(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                own = cache()
                if own is not None and any(value is own for value in (*args, *kwargs.values())):
                    own.forward_ended(output[0])

            handles.append(model.get_decoder().register_forward_hook(ended, with_kwargs=True))
        self._finalizer = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Take the hook off the model, where there is one. What was kept can still be read."""
        if self._finalizer is not None:
            self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenCache:
        """Refuse: the hook of the original would not feed the copy."""
        raise TypeError("a compressed cache cannot be copied; make another with compress(model, method)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compress(model: PreTrainedModel, method: Method) -> OpenCache:
    """Make a cache that keeps what `method` chooses.

    Pass it as `model.generate(**inputs, cache=cache)`, or `past_key_values=cache` before transformers 5.24; or to
    `model(...)`. Every part of a prompt, also of one read in several calls, is compressed at its end: queries of
    the part attend to all of it and to what was kept before. Decoding then goes on from what is kept.

    Args:
        model: a decoder that uses transformers' attention interface with sdpa or eager attention.
        method: what to keep; without state, so one method serves any number of caches.

    Returns:
        An empty cache. Layers with a sliding window keep transformers' own cache, which is bounded already.

    Raises:
        ValueError: for a model, attention or configuration that cannot be compressed, or budgets that do not
            match its layers.
        TypeError: if `method` is not one, but a cache for example.
    """
    if not isinstance(method, Method):
        raise TypeError(
            f"{type(method).__name__} is no method; give one such as ChunkKV(budget=128). Static and quantised caches "
            "cannot be compressed: pass the cache that compress returns instead of them"
        )
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder; compression works for decoders, such as Llama or Qwen3")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} does not use transformers' attention interface; "
            "compression works for models that do, such as Llama, Qwen3, Mistral, Gemma, Phi or GPT-NeoX"
        )
    chosen = config._attn_implementation
    if chosen not in SUPPORTED:
        raise ValueError(
            f"attention {chosen!r} cannot be compressed; load the model with attn_implementation='sdpa' or 'eager'"
        )
    generation = getattr(model.generation_config, "cache_implementation", None)
    if generation not in (None, "dynamic", "hybrid"):
        raise ValueError(
            f"the generation configuration asks for a {generation} cache, which cannot be combined with this one; "
            "set model.generation_config.cache_implementation = None"
        )
    modules = {
        m.layer_idx: m
        for m in model.modules()
        if isinstance(getattr(m, "layer_idx", None), int) and "Attention" in type(m).__name__ and hasattr(m, "config")
    }
    own = DynamicCache(config=config).layers
    strange = next((la for la in own if type(la) not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if strange is not None or any(n not in modules for n in range(len(own))):
        kind = type(strange).__name__ if strange is not None else "without an attention module of their own"
        raise ValueError(
            f"{name} has cache layers of a kind that cannot be compressed ({kind}); compression works for models "
            "whose layers have full or sliding-window attention"
        )
    full = [n for n, layer in enumerate(own) if type(layer) is DynamicLayer]
    if not full:
        raise ValueError(
            f"every layer of {name} has a sliding window, which bounds the cache already; there is nothing to compress"
        )
    if method.budgets is not None and len(method.budgets) not in (1, len(full)):
        raise ValueError(
            f"{len(method.budgets)} budgets for {len(full)} full-attention layers; give one, or {len(full)}"
        )

    for ordinal, n in enumerate(full):
        heads = method.head_budgets(ordinal)
        there = _kv_heads(modules[n])
        if heads is not None and len(heads) != there:
            raise ValueError(f"{len(heads)} budgets for {there} KV heads in layer {n}; give {there}, or one number")
        if heads is not None and hasattr(modules[n], "sinks"):
            raise ValueError(
                f"{name} has attention sinks for all heads together, which cannot be computed head by head; "
                "give one budget for all heads of a layer"
            )

    if method.budget_bytes is not None:
        method.entries(1, 0, sum(_entry_bytes(modules[n], model.dtype) for n in full))

    rotate = rotation_of(model, modules[full[0]]) if method.needs_rotation else None
    tokens = Tokens(rule=method.chunk_rule, rotate=rotate)
    if isinstance(method, Melted):
        if not any(name.split(".")[-1] == "rotary_emb" for name, _ in model.named_modules()):
            raise ValueError(
                f"{name} has no rotary embedding; keys with a position of their own cannot melt. Use ChunkKV or SnapKV"
            )
        if method.needs_information:
            tokens.surprise = Surprise(logits_of(model))
    layers: list[Any] = list(own)
    for ordinal, n in enumerate(full):
        heads = method.head_budgets(ordinal)
        layers[n] = (
            CompressedLayer(method, tokens, ordinal, len(full))
            if heads is None
            else HeadGroups(method, heads, tokens, ordinal, len(full))
        )
    configs = [modules[n].config for n in range(len(own))]
    cache = OpenCache(layers, configs, method, tokens)
    if method.chunk_rule is not None:
        cache.listen(model)
    return cache


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _kv_heads(attention: Any) -> int:
    """KV heads of an attention module."""
    return int(attention.config.num_attention_heads // getattr(attention, "num_key_value_groups", 1))


def _entry_bytes(attention: Any, dtype: torch.dtype) -> int:
    """Bytes of one entry in every KV head of a layer, as its module says; the cache checks again with real keys."""
    width: int = getattr(attention, "head_dim", 0) or getattr(attention, "head_size", 0)
    return int(2 * width * dtype.itemsize * _kv_heads(attention))
