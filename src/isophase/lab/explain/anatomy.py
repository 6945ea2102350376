"""Where a model keeps what `isophase explain` looks at: heads before their projection, gates, anchors.

One place knows the module names of our models and of transformers' `deepseek_v4`; any other model whose
attention has an `o_proj` has heads, but no gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from isophase.models import WindowBranch, WindowCompressor

Remake = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionHeads:
    """The heads of one layer.

    Attributes:
        layer: index of the layer.
        projection: module whose input holds the outputs of all query heads, in order, as its last channels.
        query_heads: number of query heads.
        kv_heads: number of KV heads; each serves neighbouring query heads.
        head_width: channels of a head.
    """

    layer: int
    projection: nn.Module
    query_heads: int
    kv_heads: int
    head_width: int

    def channels(self, first_head: int, last_head: int) -> slice:
        """Channels of the query heads `first_head..last_head-1`."""
        return slice(first_head * self.head_width, last_head * self.head_width)


@dataclass(frozen=True, kw_only=True, eq=False)
class GateBranch:
    """One set of gates, and its parameters that belong to an offset.

    Attributes:
        layer: index of the layer.
        name: `keys`, `values`, `keys and values` (tied), or `indexer`.
        kind: whose module it is.
        module: `WindowBranch`, or a compressor or indexer of `deepseek_v4`.
        window_tokens: W, slots.
        stride_tokens: S.
        gates: parameters of the gates, axis 0 by slot.
        payloads: parameters of the payloads, axis 0 by slot; empty where slots share them.
    """

    layer: int
    name: str
    kind: Literal["compressed_qwen3", "deepseek_v4"]
    module: nn.Module
    window_tokens: int
    stride_tokens: int
    gates: tuple[nn.Parameter, ...]
    payloads: tuple[nn.Parameter, ...]


def attention_heads(model: Any) -> list[AttentionHeads]:
    """The attention layers of a model, in order; empty where its modules are not known."""
    config = model.config.get_text_config()
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    found: list[AttentionHeads] = []
    for module in model.modules():
        projection = getattr(module, "o_proj", None) or getattr(module, "o_a_proj", None)
        layer = getattr(module, "layer_idx", None)
        width = getattr(module, "head_dim", None)
        if isinstance(projection, nn.Module) and isinstance(layer, int) and isinstance(width, int):
            found.append(
                AttentionHeads(
                    layer=layer, projection=projection, query_heads=query_heads, kv_heads=kv_heads, head_width=width
                )
            )
    return sorted(found, key=lambda heads: heads.layer)


def gate_branches(model: Any) -> list[GateBranch]:
    """All gates of a model's compressors, in order of layers; empty without compression."""
    found: list[GateBranch] = []
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        compressor = getattr(module, "compressor", None)
        if not isinstance(layer, int) or compressor is None:
            continue
        if isinstance(compressor, WindowCompressor) and compressor.grid is not None:
            found += _own_branches(layer, compressor)
        elif hasattr(compressor, "position_bias"):
            found.append(_deepseek_branch(layer, "keys and values", compressor))
            indexer = getattr(compressor, "indexer", None)
            if indexer is not None:
                found.append(_deepseek_branch(layer, "indexer", indexer))
    return found


def _own_branches(layer: int, compressor: WindowCompressor) -> Iterator[GateBranch]:
    grid = compressor.grid
    assert grid is not None
    named: list[tuple[str, WindowBranch]] = [("keys and values", compressor.keys)]
    if compressor.values is not None:
        named = [("keys", compressor.keys), ("values", compressor.values)]
    for name, branch in named:
        by_slot = branch.groups == grid.window_tokens
        gates = [branch.gate_WDK if by_slot else None, branch.gate_bias_WK]
        yield GateBranch(
            layer=layer,
            name=name,
            kind="compressed_qwen3",
            module=branch,
            window_tokens=grid.window_tokens,
            stride_tokens=grid.stride_tokens,
            gates=tuple(p for p in gates if p is not None),
            payloads=(branch.payload_WDC,) if by_slot else (),
        )


def _deepseek_branch(layer: int, name: str, module: Any) -> GateBranch:
    series = module.position_bias.shape[1] // module.head_dim
    return GateBranch(
        layer=layer,
        name=name,
        kind="deepseek_v4",
        module=module,
        window_tokens=series * module.compress_rate,
        stride_tokens=module.compress_rate,
        gates=(module.position_bias,),
        payloads=(),
    )


def by_offset(parameter: torch.Tensor, stride_tokens: int) -> torch.Tensor:
    """View axis 0 (slots) as [blocks, S]: what a phase meets. One block where S does not divide the slots."""
    slots = parameter.shape[0]
    size = stride_tokens if slots % stride_tokens == 0 else slots
    return parameter.reshape(slots // size, size, *parameter.shape[1:])


def roll(delta: int, stride_tokens: int) -> Remake:
    """Give every offset the parameters of the offset `delta` before it, cyclically."""
    return lambda p: torch.roll(by_offset(p, stride_tokens), delta, dims=1).reshape(p.shape)


def average(stride_tokens: int) -> Remake:
    """Give every offset the mean of the parameters of all offsets."""

    def remake(p: torch.Tensor) -> torch.Tensor:
        blocks = by_offset(p, stride_tokens)
        return blocks.mean(dim=1, keepdim=True).expand_as(blocks).reshape(p.shape)

    return remake


@contextmanager
def changed(parameters: Iterable[nn.Parameter], remake: Remake) -> Iterator[None]:
    """Change parameters in place for the length of a `with` block; they are restored whatever happens.

    Args:
        parameters: each once.
        remake: gives the new values, same shape; it must not write to its argument.
    """
    kept = [(p, p.detach().clone()) for p in parameters]
    try:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(remake(before))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)


@contextmanager
def hooked(handles: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Register hooks for the length of a `with` block; they are removed whatever happens.

    Args:
        handles: functions that each register one hook and return its handle.
    """
    with ExitStack() as stack:
        for register in handles:
            stack.callback(register().remove)
        yield
