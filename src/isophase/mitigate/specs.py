"""Specs of targets, those that vote included: `hf:DIR|vote(8)`, `http://HOST:PORT/v1#MODEL|vote(8)`.

Torch is imported only where a target needs it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from isophase.errors import IsophaseError
from isophase.mitigate.vote.combine import RULES, Rule
from isophase.mitigate.vote.shifts import choose_shifts, neutral_ids
from isophase.targets import ServerOptions, Target
from isophase.targets import open_target as open_plain

if TYPE_CHECKING:
    from isophase.mitigate.vote.local import VotedTarget
    from isophase.targets.huggingface import HuggingFaceTarget

__all__ = ["VOTERS", "neutral_ids", "open_target", "vote_suffix", "with_vote"]

_SPEC = re.compile(r"(?P<base>.*)\|vote\((?P<shifts>[0-9:]+)(?:, (?P<rule>[a-z-]+))?\)")
_DEFAULT_RULE = "mean-probability"
_LOCAL, _SERVERS = ("hf:", "isophase:"), ("http://", "https://")
VOTERS = (*_LOCAL, *_SERVERS)
"""How specs begin of targets that can vote."""


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
    found = _SPEC.fullmatch(spec)
    if found is None:
        return open_plain(spec, gguf_file=gguf_file, server=server)
    base = found["base"]
    if not base.startswith(VOTERS) or "|" in base:
        raise IsophaseError(f"{base!r} cannot vote.", "Vote with isophase:NAME, hf:PATH_OR_ID or http://HOST:PORT/v1.")
    if base.startswith(_SERVERS):
        from isophase.mitigate.vote.server import VotedServerTarget

        shifts, rule = _read_vote(spec)
        return VotedServerTarget(base, name=spec, shifts=shifts, rule=rule, options=server or ServerOptions())
    inner = cast("HuggingFaceTarget", open_plain(base, gguf_file=gguf_file))
    return with_vote(inner, spec.removeprefix(base))


def with_vote(inner: HuggingFaceTarget, suffix: str) -> VotedTarget:
    """A local model that votes.

    Args:
        inner: the model; it is loaded once for both.
        suffix: what `vote_suffix` returned.

    Raises:
        IsophaseError: for impossible shifts.
    """
    shifts, rule = _read_vote(inner.name + suffix)
    if len(shifts) == 1:
        strides = [grid.stride_tokens for grid in inner.grids if grid.kind == "payload"]
        shifts = choose_shifts(strides or shifts, shifts[0])
    from isophase.mitigate.vote.local import VotedTarget

    return VotedTarget(inner, name=inner.name + suffix, shifts=shifts, rule=rule or _DEFAULT_RULE)


def _read_vote(spec: str) -> tuple[tuple[int, ...], Rule | None]:
    """Shifts of a vote, or their number alone, and its rule where one is named.

    Raises:
        IsophaseError: for shifts or a rule that cannot be.
    """
    found = _SPEC.fullmatch(spec)
    assert found is not None
    shifts, rule = tuple(int(part) for part in found["shifts"].split(":")), found["rule"]
    listed = len(shifts) > 1
    wrong = (shifts[0] != 0 or len(set(shifts)) < len(shifts)) if listed else shifts[0] < 1
    if wrong or rule not in (None, *RULES):
        raise IsophaseError(f"{spec}: shifts must be different and begin with 0.", f"Rules are {', '.join(RULES)}.")
    return shifts, cast("Rule | None", rule)
