"""Patterns as text: `vertical_slash(columns=512, slash_tokens=1024)`."""

from __future__ import annotations

from dataclasses import fields

from isophase.errors import IsophaseError
from isophase.prefill.patterns import KINDS, Pattern
from isophase.specs import read_call, refuse_strangers

EXAMPLE = "vertical_slash(columns=512, slash_tokens=1024)"


def write_pattern(pattern: Pattern) -> str:
    """A pattern as text, with all of its sizes."""
    sizes = ", ".join(f"{f.name}={getattr(pattern, f.name)}" for f in fields(pattern) if f.init)
    return f"{pattern.name}({sizes})" if sizes else pattern.name


def parse_pattern(text: str) -> Pattern:
    """A pattern from text.

    Args:
        text: a name, or a call with keywords; sizes that are left out keep their defaults.

    Raises:
        IsophaseError: for an unknown name or size, or a size out of range.
    """
    call = read_call(text, what="pattern", example=EXAMPLE)
    kind = KINDS.get(call.name)
    if kind is None:
        raise IsophaseError(f"pattern {call.name!r} is unknown.", f"Give one of {', '.join(KINDS)}.")
    if call.values:
        raise IsophaseError(f"cannot read the pattern {text!r}.", f"Write it like {EXAMPLE}.")
    sizes = call.settings
    refuse_strangers(call.name, sizes, [f.name for f in fields(kind) if f.init])  # type: ignore[arg-type]
    if wrong := next((size for size, value in sizes.items() if type(value) is not int), None):
        raise IsophaseError(f"{wrong} of {text!r} is {sizes[wrong]!r}.", "Give a whole number.")
    try:
        return kind(**sizes)
    except ValueError as error:
        raise IsophaseError(f"{text!r}: {error}.") from error
