"""Methods written as text: `chunkkv(budget=128, chunk_tokens=10)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from isophase.cache.methods.base import Method
from isophase.cache.methods.chunkkv import ChunkKV
from isophase.cache.methods.dynamic import DynamicChunkKV, delimiter_rule, hash_rule
from isophase.cache.methods.full import Full
from isophase.cache.methods.merged import MergedChunks
from isophase.cache.methods.snapkv import SnapKV
from isophase.cache.methods.streaming import StreamingLLM
from isophase.cache.methods.voted import VotedChunkKV
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
}
EXAMPLE = "chunkkv(budget=128, chunk_tokens=10)"
RULES = ("delimiters", "hash")
_RULE_SETTINGS = ("radius_tokens", "max_tokens")


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
    if kind is DynamicChunkKV:
        rule = settings.pop("rule", "delimiters")
        sizes = {key: settings.pop(key) for key in _RULE_SETTINGS if key in settings}
        if rule not in RULES:
            raise IsophaseError(f"rule {rule!r} of {spec!r} is unknown.", f"Give one of {', '.join(RULES)}.")
        try:
            made = delimiter_rule(decode, vocabulary, **sizes) if rule == "delimiters" else hash_rule(**sizes)
        except (TypeError, ValueError) as error:
            raise IsophaseError(f"{spec!r}: {error}.") from error
        settings["rule"] = made
    known = [f.name for f in fields(kind) if f.init]
    refuse_strangers(name, settings, [*known, *(_RULE_SETTINGS if kind is DynamicChunkKV else ())])
    wrong = next((f for f in fields(kind) if f.name in settings and not _fits(settings[f.name], f)), None)
    if wrong is not None:
        raise IsophaseError(f"{wrong.name} of {spec!r} is {settings[wrong.name]!r}.", f"It is {wrong.type}.")
    try:
        return kind(**settings)
    except ValueError as error:
        raise IsophaseError(f"{spec!r}: {error}.") from error


def _whole(value: Any) -> bool:
    """Whether a value is a tuple of whole numbers."""
    return isinstance(value, tuple) and len(value) > 0 and all(type(v) is int for v in value)


def _fits(value: Any, field: Any) -> bool:
    """Whether a value has the type that a field's default or annotation shows."""
    kind = str(field.type)
    if field.name == "rule":
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
