"""Specs of targets, those that vote included: `hf:DIR|vote(8)`. Torch is imported only where a target needs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from isophase.errors import IsophaseError
from isophase.mitigate.combine import RULES
from isophase.mitigate.shifts import choose_shifts
from isophase.probes.lexicon import FILLER
from isophase.probes.prompt import Tokenizer
from isophase.targets import ServerOptions, Target
from isophase.targets import open_target as open_plain

if TYPE_CHECKING:
    from isophase.mitigate.voted import VotedTarget
    from isophase.targets.huggingface import HuggingFaceTarget

__all__ = ["neutral_ids", "open_target", "vote_suffix", "with_vote"]

_SPEC = re.compile(r"(?P<base>.*)\|vote\((?P<shifts>[0-9:]+)(?:, (?P<rule>[a-z-]+))?\)")
_DEFAULT_RULE = "mean-probability"


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
    """As `isophase.targets.open_target`; specs of local models may end in `|vote(SHIFTS)` or `|vote(SHIFTS, RULE)`.

    Args:
        spec: of a target; SHIFTS is a number of shifts, or shifts with colons between them, the first one 0.
        gguf_file: as there.
        server: as there.

    Raises:
        IsophaseError: as there; for a vote of something else than a local model, or impossible shifts.
    """
    found = _SPEC.fullmatch(spec)
    if found is None:
        return open_plain(spec, gguf_file=gguf_file, server=server)
    base = found["base"]
    if not base.startswith(("hf:", "isophase:")) or "|" in base:
        raise IsophaseError(f"{base!r} cannot vote.", "Vote with isophase:NAME or hf:PATH_OR_ID.")
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
    found = _SPEC.fullmatch(suffix)
    assert found is not None
    rule = found["rule"] or _DEFAULT_RULE
    listed = [int(part) for part in found["shifts"].split(":")]
    if len(listed) > 1:
        shifts: Sequence[int] = listed
    else:
        strides = [grid.stride_tokens for grid in inner.grids if grid.kind == "payload"]
        shifts = choose_shifts(strides or listed, listed[0])
    if shifts[0] != 0 or len(set(shifts)) < len(shifts) or rule not in RULES:
        raise IsophaseError(
            f"{inner.name}{suffix}: shifts must be different and begin with 0.", f"Rules are {', '.join(RULES)}."
        )
    from isophase.mitigate.voted import VotedTarget

    return VotedTarget(inner, name=inner.name + suffix, shifts=tuple(shifts), rule=rule)


def neutral_ids(tokenizer: Tokenizer) -> list[int]:
    """Token ids that mean nothing: a line break, or a filler word where the vocabulary has no line break.

    Raises:
        IsophaseError: if the tokenizer has neither as one token.
    """
    for text in ("\n", *(f" {word}" for word in FILLER), *FILLER):
        ids = tokenizer.encode(text)
        if len(ids) == 1 and tokenizer.decode(ids).strip(" ") == text.strip(" "):
            return ids
    raise IsophaseError("this tokenizer has no neutral token.", "Give neutral_ids to PhaseVote yourself.")
