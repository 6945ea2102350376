"""`sparse_prefill`: a model whose prompts are read sparsely, for as long as a `with` block lasts.

The attention function of the model is set, by name, to `attend` below, and set back at the end. No module is
patched, no hook stays, and no other model's attention changes. Decoding, short prompts and whatever `attend` does not
recognise go to sdpa.

Legend: B rows, H query heads, K KV heads, T queries, L keys, D head width.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from isophase.prefill.choose.adapt import Adaptive
from isophase.prefill.choose.ledger import Ledger
from isophase.prefill.choose.machine import Costs, costs_of
from isophase.prefill.choose.policy import Auto, Policy, Table
from isophase.prefill.execution.engine import Settings, attend_row
from isophase.prefill.execution.masks import MaskShape, read_mask
from isophase.prefill.execution.threads import threads_by_piece
from isophase.prefill.patterns import AShape, BlockSparse, Dense, Pattern, VerticalSlash
from isophase.prefill.patterns.file import PatternFile, read_patterns
from isophase.prefill.patterns.spec import write_pattern
from isophase.prefill.run import CallRun, PrefillRun
from isophase.prefill.sample import Sampling

ATTENTION = "isophase_prefill"
BASE = "sdpa"
# The device decides where reading sparsely begins to pay; on others than the CPU it is not measured here.
_UNMEASURED_THRESHOLD_TOKENS = 32_768

Patterns = str | Path | PatternFile | Pattern | Sequence[Sequence[Pattern]] | Policy


@dataclass(kw_only=True, eq=False)
class _Session:
    """What one `with` block knows."""

    settings: Settings
    threshold_tokens: int | None
    run: PrefillRun
    ledger: Ledger
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The mask that was read last: all layers of a kind are given the same one.
    mask: Any = None
    shape: MaskShape | None = None

    def settings_for(self, query: torch.Tensor) -> tuple[Settings, int]:
        """Settings with this machine's costs, and the shortest prompt that is read sparsely."""
        settings = self.settings
        if self.threshold_tokens is None:
            if query.device.type != "cpu":
                self.threshold_tokens = _UNMEASURED_THRESHOLD_TOKENS
            else:
                costs = costs_of(query.shape[-1], query.dtype)
                self.settings = settings = _with_costs(settings, costs)
                self.threshold_tokens = costs.threshold_tokens(threads_by_piece(query.shape[1]))
            self.run.threshold_tokens = self.threshold_tokens
        return settings, self.threshold_tokens

    def read_mask(self, mask: torch.Tensor | None, rows: int, queries: int, keys: int) -> MaskShape | None:
        """As `masks.read_mask`, once for layers that share a mask."""
        if mask is None:
            return read_mask(None, rows, queries, keys)
        known = self.mask() if self.mask is not None else None
        if known is not mask:
            self.mask, self.shape = weakref.ref(mask), read_mask(mask, rows, queries, keys)
        return self.shape


# By the identity of a configuration, while its `with` block lasts.
_sessions: dict[int, _Session] = {}


@contextmanager
def sparse_prefill(
    model: PreTrainedModel,
    patterns: Patterns = "auto",
    *,
    target_recall: float = 0.95,
    threshold_tokens: int | None = None,
    sampling: Sampling | None = None,
    query_tokens: int = 128,
) -> Iterator[PrefillRun]:
    """Read long prompts sparsely while the block lasts.

    Args:
        model: a decoder that uses transformers' attention interface with sdpa.
        patterns: `auto`, the adaptive mode; a file of `isophase prefill search`, or what it holds; one pattern for
            every head; patterns by layer and head; or a policy of your own.
        target_recall: share of attention that the adaptive mode keeps, above 0 and below 1.
        threshold_tokens: prompts shorter than this are read densely. Default: measured on this machine, once; then
            heads for which sparse attention would not pay are read densely, too. A number given here reads
            everything sparsely from there on.
        sampling: which queries are looked at.
        query_tokens: queries per block of the plan, 16 or more.

    Yields:
        What was done, filled in call by call.

    Raises:
        ValueError: for a model or an attention that cannot be read sparsely, or patterns that do not fit it.
    """
    configs = _configs(model)
    policy, name = _policy(patterns, target_recall)
    _check_fit(policy, model)
    run = PrefillRun(
        patterns=name, target_recall=target_recall if isinstance(policy, Auto) else None,
        threshold_tokens=threshold_tokens or 0,
    )  # fmt: skip
    if query_tokens < 16:
        raise ValueError(f"query_tokens is {query_tokens}; give 16 or more")
    session = _Session(
        settings=Settings(policy=policy, sampling=sampling or Sampling(), costs=None, query_tokens=query_tokens),
        threshold_tokens=threshold_tokens,
        run=run,
        ledger=Ledger(model.config.get_text_config(decoder=True).num_hidden_layers),
    )
    for config in configs:
        _sessions[id(config)] = session
        # Not through the setter, which would change the configurations of other parts of the model as well.
        config._attn_implementation_internal = ATTENTION
    try:
        yield run
    finally:
        for config in configs:
            config._attn_implementation_internal = BASE
            del _sessions[id(config)]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a model in a `sparse_prefill` block.

    Args:
        module: the attention module.
        query: [B, H, T, D], rotary applied.
        key: [B, K, L, D].
        value: the same.
        attention_mask: as for sdpa.
        **kwargs: what the model passes on.

    Returns:
        [B, T, H, D], and None.
    """
    session = _sessions.get(id(module.config))
    if session is not None:
        sparse = _attend_sparsely(session, module, query, key, value, attention_mask, kwargs)
        if sparse is not None:
            return sparse, None
    result: tuple[torch.Tensor, torch.Tensor | None] = ALL_ATTENTION_FUNCTIONS[BASE](
        module, query, key, value, attention_mask, **kwargs
    )
    return result


def _attend_sparsely(
    session: _Session, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor | None, kwargs: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """The call's result [B, T, H, D], or None where it is sdpa's."""
    rows, heads, queries, _ = query.shape
    if queries == 1:
        return None  # decoding
    settings, threshold = session.settings_for(query)
    layer = int(getattr(module, "layer_idx", None) or 0)
    why = _unfit(module, query, key, value, kwargs)
    shape = None
    if why is None and key.shape[2] < threshold:
        why = "short"
    if why is None:
        shape = session.read_mask(mask, rows, queries, key.shape[2])
        if shape is None:
            why = "mask is neither causal nor sliding"
        elif all(span is None or span.end - span.first_key < threshold for span in shape.rows):
            why = "short"
        elif _mostly_past(shape):
            why = "short part of a long prompt"
        elif not session.ledger.is_open(layer, (*query.shape[:3], key.shape[2])):
            why = "given up: looking did not pay in the layers before"
    if why is not None or shape is None:
        _record(session, [
            CallRun(layer=layer, row=row, tokens=key.shape[2], queries=queries, why=why or "") for row in range(rows)
        ])  # fmt: skip
        return None
    make = torch.empty if all(s is not None and s.end - s.first_query == queries for s in shape.rows) else torch.zeros
    out_BTHD = make(rows, queries, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    calls = []
    for row, span in enumerate(shape.rows):
        if span is None:
            continue
        part = slice(span.first_query - shape.offset, span.end - shape.offset)
        keys = slice(span.first_key, span.end)
        _, call = attend_row(
            query[row, :, part], key[row, :, keys], value[row, :, keys], settings, layer=layer, row=row,
            scaling=kwargs.get("scaling"), window_tokens=span.window_tokens, out=out_BTHD[row, part].transpose(0, 1),
        )  # fmt: skip
        calls.append(call)
    session.ledger.book(sum(call.saved for call in calls) / max(1, len(calls)))
    _record(session, calls)
    return out_BTHD


def _unfit(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> str | None:
    """Why a call cannot be read sparsely, or None."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return "gradients are wanted"
    if kwargs.get("dropout"):
        return "dropout"
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "not causal"
    if key.shape[-1] != value.shape[-1]:
        return "keys and values differ in size"
    extra = next((n for n in ("softcap", "s_aux", "position_bias", "sinks") if kwargs.get(n) is not None), None)
    return None if extra is None else f"attention with {extra}"


def _mostly_past(shape: MaskShape) -> bool:
    """Whether there are too few queries to sample among them: parts of a prompt, as while guessing ahead."""
    return all(span is None or span.end - span.first_query < 256 for span in shape.rows)


def _record(session: _Session, calls: list[CallRun]) -> None:
    with session.lock:
        session.run.calls.extend(calls)


def _with_costs(settings: Settings, costs: Costs) -> Settings:
    return Settings(
        policy=settings.policy, sampling=settings.sampling, costs=costs, query_tokens=settings.query_tokens,
        key_tokens=settings.key_tokens,
    )  # fmt: skip


def _configs(model: PreTrainedModel) -> list[Any]:
    """Configurations that name the attention function.

    Raises:
        ValueError: for a model that cannot be read sparsely.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder; sparse prefill works for decoders, such as Llama or Qwen3")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} does not use transformers' attention interface; "
            "sparse prefill works for models that do, such as Llama, Qwen3, Mistral, Phi or GPT-NeoX"
        )
    text = model.config.get_text_config(decoder=True)
    found = {id(text): text}
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__:
            config = getattr(module, "config", text)
            found[id(config)] = config
    chosen = {config._attn_implementation for config in found.values()}
    if ATTENTION in chosen:
        raise ValueError(f"{name} is read sparsely already; end that block first")
    if chosen != {BASE}:
        raise ValueError(
            f"attention {sorted(map(str, chosen))[0]!r} cannot be read sparsely; "
            "load the model with attn_implementation='sdpa'"
        )
    return list(found.values())


def _policy(patterns: Patterns, target_recall: float) -> tuple[Policy, str]:
    """The policy, and what the report calls it."""
    if patterns == "auto":
        return Auto(mode=Adaptive(target_recall=target_recall)), "auto"
    if isinstance(patterns, str | Path):
        return read_patterns(Path(patterns)).table(), str(patterns)
    if isinstance(patterns, PatternFile):
        return patterns.table(), "patterns"
    if isinstance(patterns, (Dense, AShape, VerticalSlash, BlockSparse)):
        return Table(layers=[[patterns]]), write_pattern(patterns)
    if hasattr(patterns, "choose"):
        return cast("Policy", patterns), type(patterns).__name__
    return Table(layers=patterns), "patterns by layer and head"


def _check_fit(policy: Policy, model: PreTrainedModel) -> None:
    """Raise ValueError where a table is for another model."""
    if not isinstance(policy, Table):
        return
    config = model.config.get_text_config(decoder=True)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if len(policy.layers) not in (1, layers):
        raise ValueError(f"patterns for {len(policy.layers)} layers; the model has {layers}")
    if wrong := next((len(row) for row in policy.layers if len(row) not in (1, heads)), None):
        raise ValueError(f"patterns for {wrong} heads; the model has {heads}")


# Entries under a name of ours; no existing function is replaced.
AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[BASE])
