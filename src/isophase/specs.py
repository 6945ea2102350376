"""The one grammar of specs: what answers, and in which way.

    SPEC   = PLACE ["|" CALL]...
    PLACE  = isophase:NAME | hf:PATH_OR_ID | http(s)://HOST:PORT/v1#MODEL | planted:KEY=VALUE,...
    CALL   = NAME | NAME(ARGUMENT, ...)          ARGUMENT = VALUE | KEY=VALUE
    VALUE  = a Python literal, a bare word, or for arguments without a name a CALL or shifts such as 0:8:16

A place says what answers; a call behind a bar says how: a cache method (`chunkkv(budget=128)`), a sparse prefill
(`prefill(block_sparse(windows=8))`), a vote (`vote(8)`). Cache methods, patterns and chunk rules are calls, too.
This module reads; whoever owns a name decides what it means.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from isophase.errors import IsophaseError

__all__ = [
    "PLACES",
    "Call",
    "Spec",
    "base_of",
    "model_spec",
    "read_call",
    "read_settings",
    "read_spec",
    "refuse_strangers",
]

PlaceKind = Literal["isophase", "hf", "server", "planted"]

PLACES = "isophase:NAME, hf:PATH_OR_ID, http://HOST:PORT/v1#MODEL or planted:SETTINGS"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A name with arguments.

    Attributes:
        text: as it was written, without blanks around it.
        name: what is called.
        values: arguments without a name, in order.
        settings: arguments with a name; bare words are texts.
    """

    text: str
    name: str
    values: tuple[Any, ...] = ()
    settings: Mapping[str, Any]

    @property
    def inside(self) -> str:
        """What stands between the outer parentheses, as it was written; empty without them."""
        return self.text.partition("(")[2].removesuffix(")").strip()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What answers, and in which way.

    Attributes:
        text: the whole spec.
        kind: of the place.
        place: name of a bundled model, path or id of a Hugging Face model, URL with the model behind `#`, or settings.
        base: the spec without its calls.
        calls: texts of the calls behind the bars, outermost last.
    """

    text: str
    kind: PlaceKind
    place: str
    base: str
    calls: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        """Whether it is a model in this process."""
        return self.kind in ("isophase", "hf")

    @property
    def url(self) -> str:
        """Of a server, without the model."""
        return self.place.partition("#")[0]

    @property
    def model(self) -> str:
        """Behind a server's `#`; empty where none is named."""
        return self.place.partition("#")[2]


# Written without quotes in a call: shifts such as 0:8:16, and words with hyphens.
_BARE = re.compile(r"""(?<![\w'".:-])(?:\d+(?::\d+)+|[A-Za-z]+(?:-[A-Za-z]+)+)(?![\w'".:-])""")


def read_spec(text: str, *, what: str = "target", places: str = PLACES) -> Spec:
    """Read a spec.

    Args:
        text: such as `hf:model|chunkkv(budget=128)`.
        what: it is called in messages.
        places: what is offered in messages.

    Returns:
        Its parts. Calls are cut, not read: only their owners know their names.

    Raises:
        IsophaseError: if it begins like no place, or a bar has nothing behind it.
    """
    base, *calls = _cut(text, "|")
    kind, colon, rest = base.partition(":")
    unknown = IsophaseError(
        f"unknown {what} {text!r}.", f"A {what} is {places}; `isophase models` lists the bundled ones."
    )
    if kind in ("http", "https") and rest.startswith("//"):
        found: PlaceKind = "server"
        rest = base
    elif colon and (kind == "planted" or (kind in ("isophase", "hf") and rest)):
        found = cast(PlaceKind, kind)
    else:
        raise unknown
    if not all(call.strip() for call in calls):
        raise IsophaseError(f"{what} {text!r} has nothing behind a bar.", "Write it like hf:PATH|chunkkv(budget=128).")
    return Spec(text=text, kind=found, place=rest, base=base, calls=tuple(call.strip() for call in calls))


def model_spec(text: str) -> Spec:
    """Read the spec of a model; the folder of one may stand for itself.

    Raises:
        IsophaseError: as from `read_spec`.
    """
    begins = text.partition(":")[0] in ("isophase", "hf", "http", "https", "planted") and ":" in text
    return read_spec(text if begins else f"hf:{text}", what="model")


def base_of(text: str) -> str:
    """A spec or the name of a target without its calls; anything is taken."""
    return _cut(text, "|")[0]


def read_call(text: str, *, what: str, example: str) -> Call:
    """Read a name with arguments.

    Args:
        text: such as `chunkkv(budget=128, pooling=max)`. A hyphen in the name counts as a part of it.
        what: it is called in messages, such as `cache method`.
        example: shown in messages.

    Raises:
        IsophaseError: if it is no such call.
    """
    problem = IsophaseError(f"cannot read the {what} {text!r}.", f"Write it like {example}.")
    written = text.strip()
    head, parenthesis, tail = written.partition("(")
    try:
        node = ast.parse(
            head.replace("-", "_") + parenthesis + _BARE.sub(lambda word: repr(word[0]), tail), mode="eval"
        ).body
    except (SyntaxError, ValueError):
        raise problem from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise problem
    settings: dict[str, Any] = {}
    try:
        values = tuple(_value(argument) for argument in call.args)
        for keyword in call.keywords:
            if keyword.arg is None:
                raise problem
            settings[keyword.arg] = _value(keyword.value)
    except (ValueError, TypeError, SyntaxError):
        raise problem from None
    return Call(text=written, name=head.strip(), values=values, settings=settings)


def read_settings(text: str, *, known: Sequence[str], what: str) -> dict[str, str]:
    """Read the settings of a place: `KEY=VALUE,KEY=VALUE`, values as they are written.

    Args:
        text: the settings; empty for none.
        known: keys.
        what: stands before messages, such as `planted:`.

    Raises:
        IsophaseError: for an unknown key, a missing value, or a key given twice.
    """
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in _cut(text, ","))):
        key, _, value = (side.strip() for side in part.partition("="))
        if key not in known or not value:
            raise IsophaseError(f"{what} cannot read {part!r}.", f"Write key=value with keys from: {', '.join(known)}.")
        if key in chosen:
            raise IsophaseError(f"{what} {key} is given twice.", "Give it once.")
        chosen[key] = value
    return chosen


def refuse_strangers(name: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a setting that a name does not have.

    Raises:
        IsophaseError: with the settings that it has.
    """
    if strange := next((key for key in given if key not in known), None):
        raise IsophaseError(f"{name} has no setting {strange!r}.", f"It has {', '.join(known) or 'none'}.")


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _cut(text: str, mark: str) -> list[str]:
    """Cut at marks outside parentheses."""
    parts, depth, first = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == mark and depth <= 0:
            parts.append(text[first:at])
            first = at + 1
    return [*parts, text[first:]]
