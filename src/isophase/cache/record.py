"""Read a text once and compress it by many methods.

What a method keeps at the end of a prompt depends on the full attention over the prompt and on nothing that other
methods do, so comparisons need not read the prompt again for each of them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import PreTrainedModel

from isophase.cache.attach import OpenCache, compress
from isophase.cache.methods.base import Method
from isophase.cache.methods.dynamic import hash_rule
from isophase.cache.methods.full import Full
from isophase.cache.runtime.heads import HeadGroups
from isophase.cache.runtime.layers import CompressedLayer
from isophase.chunking import ChunkRule


@dataclass(frozen=True, kw_only=True)
class Record(Full):
    """Keeps everything, and the newest queries with it, for `compressed`."""

    window_tokens: int = 64

    @property
    def records(self) -> bool:
        """The newest queries stay."""
        return True

    @property
    def chunk_rule(self) -> ChunkRule | None:
        """Any rule: it makes the cache listen to token ids, which methods may need later."""
        return hash_rule()


def compressed(model: PreTrainedModel, recorded: OpenCache, method: Method) -> OpenCache:
    """Compress what a recording cache has read, as if it had been read in one call with `method`.

    Args:
        model: that read it.
        recorded: a cache of `compress(model, Record())` after one forward pass; it is left as it is, and can be
            compressed again.
        method: what to keep.

    Returns:
        A cache of its own; until it grows it may share tensors with the recording.

    Raises:
        ValueError: if the cache did not record, or recorded fewer queries than the method's window.
    """
    if not isinstance(recorded.method, Record):
        raise ValueError("the cache did not record; read the text with compress(model, Record())")
    if recorded.method.window_tokens < method.window_tokens and method.compresses and method.needs_votes:
        raise ValueError(
            f"{recorded.method.window_tokens} queries were recorded and the method reads {method.window_tokens}; "
            f"use Record(window_tokens={method.window_tokens})"
        )
    cache = compress(model, method)
    source, target = recorded.tokens, cache.tokens
    target.real_BL = source.real_BL
    target.ids_BL = source.ids_BL if target.rule is not None else None
    for n, layer in enumerate(recorded.layers):
        if isinstance(layer, CompressedLayer):
            own = cache.layers[n]
            assert isinstance(own, CompressedLayer | HeadGroups)
            own.adopt(layer)
        else:
            # Its tensors are replaced, never written to, so a shallow copy is one of its own.
            cache.layers[n] = copy.copy(layer)
    return cache
