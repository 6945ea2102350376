"""Patterns as text: `vertical_slash(columns=512, slash_tokens=1024)`."""

from __future__ import annotations

import ast
from dataclasses import fields

from isophase.errors import IsophaseError
from isophase.prefill.patterns import KINDS, Pattern


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
    example = "Write it like vertical_slash(columns=512, slash_tokens=1024)."
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            name, sizes = node.id, {}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            name = node.func.id
            sizes = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        else:
            raise ValueError("neither a name nor a call")
    except (SyntaxError, ValueError):
        raise IsophaseError(f"cannot read the pattern {text!r}.", example) from None
    kind = KINDS.get(name)
    if kind is None:
        raise IsophaseError(f"pattern {name!r} is unknown.", f"Give one of {', '.join(KINDS)}.")
    known = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    if strange := next((size for size in sizes if size not in known), None):
        raise IsophaseError(f"{name} has no size {strange!r}.", f"It has {', '.join(known) or 'none'}.")
    if wrong := next((size for size, value in sizes.items() if type(value) is not int), None):
        raise IsophaseError(f"{wrong} of {text!r} is {sizes[wrong]!r}.", "Give a whole number.")
    try:
        return kind(**sizes)
    except ValueError as error:
        raise IsophaseError(f"{text!r}: {error}.") from error
