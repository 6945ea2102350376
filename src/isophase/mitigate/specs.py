"""Targets by their specs, those that vote included: `hf:DIR|vote(8)`, `http://HOST:PORT/v1#MODEL|vote(0:8, majority)`.

The grammar is that of `isophase.specs`. Torch is imported only where a target needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from isophase.errors import IsophaseError
from isophase.mitigate.vote.rules import RULES, Rule
from isophase.mitigate.vote.shifts import choose_shifts
from isophase.specs import read_call, read_spec
from isophase.targets import ServerOptions, Target
from isophase.targets import open_target as open_plain

if TYPE_CHECKING:
    from isophase.mitigate.vote.local import VotedTarget
    from isophase.targets import HuggingFaceTarget

__all__ = ["can_vote", "open_target", "vote_suffix", "with_vote"]

_DEFAULT_RULE = "mean-probability"
_EXAMPLE = "vote(8), or vote(0:8:16, majority)"


def can_vote(spec: str) -> bool:
    """Whether what a spec names can vote: a model as it is, or a server.

    Raises:
        IsophaseError: for an unknown kind.
    """
    read = read_spec(spec)
    return not read.calls and read.kind != "planted"


def vote_suffix(text: str) -> str:
    """What is added to a target's spec for a vote, from the text of an option.

    Args:
        text: `8` (so many shifts, spread over the model's strides), or `0,8,16` (these), then maybe a rule:
            `8 majority`.

    Raises:
        IsophaseError: for anything else.
    """
    numbers, _, rule = text.strip().partition(" ")
    shifts = numbers.split(",")
    if not all(part.isdecimal() for part in shifts) or (rule and rule not in RULES):
        raise IsophaseError(
            f"--vote is {text!r}.",
            f"Give a number of shifts, or shifts such as 0,8,16, then a rule: {', '.join(RULES)}.",
        )
    return f"|vote({':'.join(shifts)}{', ' + rule if rule else ''})"


def open_target(spec: str, *, gguf_file: str | None = None, server: ServerOptions | None = None) -> Target:
    """As `isophase.targets.open_target`; models and servers may vote: `SPEC|vote(SHIFTS)`, `SPEC|vote(SHIFTS, RULE)`.

    Args:
        spec: of a target; SHIFTS is a number of shifts, or shifts with colons between them, the first one 0.
        gguf_file: as there.
        server: as there.

    Raises:
        IsophaseError: as there; for a vote of something that cannot, or impossible shifts.
    """
    read = read_spec(spec)
    if not any(_is_vote(call) for call in read.calls):
        return open_plain(spec, gguf_file=gguf_file, server=server)
    if len(read.calls) > 1 or read.kind == "planted":
        asked = spec.removesuffix("|" + read.calls[-1])
        raise IsophaseError(f"{asked!r} cannot vote.", "Vote with isophase:NAME, hf:PATH_OR_ID or http://HOST:PORT/v1.")
    if read.kind == "server":
        from isophase.mitigate.vote.server import VotedServerTarget

        shifts, rule = _read_vote(read.calls[0])
        return VotedServerTarget(read.base, name=spec, shifts=shifts, rule=rule, options=server or ServerOptions())
    inner = cast("HuggingFaceTarget", open_plain(read.base, gguf_file=gguf_file))
    return with_vote(inner, spec.removeprefix(read.base))


def with_vote(inner: HuggingFaceTarget, suffix: str) -> VotedTarget:
    """A local model that votes.

    Args:
        inner: the model; it is loaded once for both.
        suffix: what `vote_suffix` returned.

    Raises:
        IsophaseError: for impossible shifts.
    """
    shifts, rule = _read_vote(suffix.removeprefix("|"))
    if len(shifts) == 1:
        strides = [grid.stride_tokens for grid in inner.grids if grid.kind == "payload"]
        shifts = choose_shifts(strides or shifts, shifts[0])
    from isophase.mitigate.vote.local import VotedTarget

    return VotedTarget(inner, name=inner.name + suffix, shifts=shifts, rule=rule or _DEFAULT_RULE)


def _is_vote(call: str) -> bool:
    return call.partition("(")[0].strip() == "vote"


def _read_vote(text: str) -> tuple[tuple[int, ...], Rule | None]:
    """Shifts of a vote, or their number alone, and its rule where one is named.

    Raises:
        IsophaseError: for shifts or a rule that cannot be.
    """
    call = read_call(text, what="vote", example=_EXAMPLE)
    numbers = str(call.values[0]).split(":") if call.values else []
    if call.settings or not 1 <= len(call.values) <= 2 or not all(part.isdecimal() for part in numbers):
        raise IsophaseError(f"cannot read the vote {text!r}.", f"Write it like {_EXAMPLE}.")
    shifts, rule = tuple(map(int, numbers)), call.values[1] if len(call.values) == 2 else None
    wrong = (shifts[0] != 0 or len(set(shifts)) < len(shifts)) if len(shifts) > 1 else shifts[0] < 1
    if wrong or rule not in (None, *RULES):
        raise IsophaseError(f"{text}: shifts must be different and begin with 0.", f"Rules are {', '.join(RULES)}.")
    return shifts, cast("Rule | None", rule)
