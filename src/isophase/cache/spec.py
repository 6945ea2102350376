"""Methods written as text: `chunkkv(budget=128, chunk_tokens=10)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import torch

from isophase.cache.methods.base import Method
from isophase.cache.methods.chunkkv import ChunkKV
from isophase.cache.methods.dynamic import DynamicChunkKV, delimiter_rule, hash_rule, word_rule
from isophase.cache.methods.full import Full
from isophase.cache.methods.melted import Melted, sharp_tokens
from isophase.cache.methods.merged import MergedChunks
from isophase.cache.methods.snapkv import SnapKV
from isophase.cache.methods.streaming import StreamingLLM
from isophase.cache.methods.voted import VotedChunkKV
from isophase.chunking import ChunkRule, FixedStride
from isophase.errors import IsophaseError
from isophase.specs import read_call, refuse_strangers

METHODS: dict[str, type[Method]] = {
    "full": Full,
    "streaming": StreamingLLM,
    "snapkv": SnapKV,
    "chunkkv": ChunkKV,
    "voted": VotedChunkKV,
    "dynamic": DynamicChunkKV,
    "merged": MergedChunks,
    "melted": Melted,
}
EXAMPLE = "chunkkv(budget=128, chunk_tokens=10)"
# Rules of chunks as text, with the settings that each takes.
RULES = {
    "delimiters": ("radius_tokens", "max_tokens"), "hash": ("radius_tokens", "max_tokens"), "words": ("max_tokens",),
    "fixed": ("stride_tokens", "shift_tokens"),
}  # fmt: skip
# Which setting of a method holds a rule, and which rule it is where none is named.
_RULED: dict[type[Method], tuple[str, str | None]] = {DynamicChunkKV: ("rule", "delimiters"), Melted: ("units", None)}


def parse_method(spec: str, decode: Callable[[list[int]], str], vocabulary: int) -> Method:
    """Make a method from text.

    Args:
        spec: a name, or a call with keywords: `full`, `snapkv(budget=128)`,
            `dynamic(ratio=.1, rule='delimiters', radius_tokens=4)`. Rules may stand without quotes.
        decode: text of token ids, for the rule `delimiters`.
        vocabulary: number of token ids.

    Returns:
        The method.

    Raises:
        IsophaseError: for an unknown name, an unknown setting, or a value out of range.
    """
    call = read_call(spec, what="cache method", example=EXAMPLE)
    if call.values:
        raise IsophaseError(f"cannot read the cache method {spec!r}.", f"Write it like {EXAMPLE}.")
    name, settings = call.name, dict(call.settings)
    kind = METHODS.get(name)
    if kind is None:
        raise IsophaseError(f"cache method {name!r} is unknown.", f"Give one of {', '.join(METHODS)}.")
    settings, offered = _with_rule(kind, spec, settings, decode, vocabulary)
    known = [f.name for f in fields(kind) if f.init]
    refuse_strangers(name, settings, [*known, *offered])
    if kind is Melted:
        settings["sharp"] = _sharp(settings.get("sharp", "digits"), spec, decode, vocabulary)
    wrong = next((f for f in fields(kind) if f.name in settings and not _fits(settings[f.name], f)), None)
    if wrong is not None:
        raise IsophaseError(f"{wrong.name} of {spec!r} is {settings[wrong.name]!r}.", f"It is {wrong.type}.")
    try:
        return kind(**settings)
    except ValueError as error:
        raise IsophaseError(f"{spec!r}: {error}.") from error


def _with_rule(
    kind: type[Method], spec: str, settings: dict[str, Any], decode: Callable[[list[int]], str], vocabulary: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings with the rule made of its name, and the settings that the rule takes.

    Raises:
        IsophaseError: for an unknown rule or sizes out of range.
    """
    if kind not in _RULED:
        return settings, ()
    where, default = _RULED[kind]
    rule = settings.get(where, default)
    if rule is None:
        return settings, ()
    if rule not in RULES:
        raise IsophaseError(f"rule {rule!r} of {spec!r} is unknown.", f"Give one of {', '.join(RULES)}.")
    sizes = {key: settings[key] for key in RULES[rule] if key in settings}
    made: dict[str, Callable[..., ChunkRule]] = {
        "delimiters": lambda **given: delimiter_rule(decode, vocabulary, **given),
        "words": lambda **given: word_rule(decode, vocabulary, **given),
        "hash": hash_rule,
        "fixed": lambda **given: FixedStride(**{"stride_tokens": 4, **given}),
    }
    try:
        chunks = made[rule](**sizes)
    except (TypeError, ValueError) as error:
        raise IsophaseError(f"{spec!r}: {error}.") from error
    return {**{k: v for k, v in settings.items() if k not in sizes}, where: chunks}, RULES[rule]


def _sharp(
    value: Any, spec: str, decode: Callable[[list[int]], str], vocabulary: int
) -> torch.Tensor | None:  # fmt: skip
    """What stays sharp, from `digits`, `none`, or nats for tokens with a digit."""
    if value in ("none", None):
        return None
    if value == "digits":
        return sharp_tokens(decode, vocabulary)
    if type(value) in (int, float) and value > 0:
        return sharp_tokens(decode, vocabulary, nats=float(value))
    raise IsophaseError(f"sharp of {spec!r} is {value!r}.", "Give digits, none, or nats for tokens that hold a digit.")


def _whole(value: Any) -> bool:
    """Whether a value is a tuple of whole numbers."""
    return isinstance(value, tuple) and len(value) > 0 and all(type(v) is int for v in value)


def _fits(value: Any, field: Any) -> bool:
    """Whether a value has the type that a field's default or annotation shows."""
    kind = str(field.type)
    if field.name in ("rule", "units", "sharp"):
        return True
    if field.name == "budget":
        return (
            type(value) is int
            or _whole(value)
            or (isinstance(value, tuple) and bool(value) and all(map(_whole, value)))
        )
    if "float" in kind:
        return type(value) in (int, float)
    if "bool" in kind:
        return type(value) is bool
    if "int" in kind:
        return type(value) is int or (value is None and field.default is not MISSING and field.default is None)
    return isinstance(value, str)
