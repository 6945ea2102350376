"""At how many neutral tokens a request is asked again, and the neutral text that makes so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isophase.errors import IsophaseError
from isophase.probes import FILLER, Tokenizer

MOST_SHIFT_TOKENS = 65_536
"""Longest stride that shifts are spread over; beyond that the neutral text would be longer than most prompts."""

DEFAULT_UNIT = " ."
"""Neutral text of one token in nearly every vocabulary. White space is quieter, but merges: eight spaces are
often one token, and the phase then moves by one."""

_WHITE_UNITS = ("\n", " ", " \n", "\n ", "\t", "\t\n", " \t", "\r\n")
_HEAD_CHARACTERS = 64
_BEHIND = ("", "\n", ">", " ")
"""What a chat template may end with before the text: white space could merge with that. Before a word a space is the
first to be given up: the two are often one token, which anything in between splits."""
_MOST_UNITS_PER_TOKEN = 4


class Counts(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""


def choose_shifts(strides_tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """Choose shifts that meet the phases of several strides as evenly as so few can.

    They spread over the largest stride; each moves to the nearest place at which it also takes its turn at the
    residues of the smaller strides, which plain steps of 16 over 4 and 128 would miss.

    Args:
        strides_tokens: strides S of the model, each >= 1, in any order.
        count: number of shifts wanted, the unshifted request included, >= 1.

    Returns:
        Distinct shifts in ascending order, the first one 0: `count` of them, or the largest stride if that is
        less, which then covers every phase. For every stride S, `min(count, S)` residues differ, save where
        `count` nears the largest stride.

    Raises:
        IsophaseError: no stride, a stride or count below 1, or a stride above `MOST_SHIFT_TOKENS`.
    """
    strides = sorted(set(strides_tokens))
    if not strides or strides[0] < 1 or strides[-1] > MOST_SHIFT_TOKENS:
        shown = ", ".join(map(str, strides)) or "missing"
        raise IsophaseError(f"the stride is {shown}.", f"Give one or more of 1 to {MOST_SHIFT_TOKENS:,} tokens.")
    if count < 1:
        raise IsophaseError(f"the number of shifts is {count}; it must be at least 1.", "Give 1 or more.")
    span = strides[-1]
    count = min(count, span)
    chosen = [0]
    used = {0}
    for number in range(1, count):
        wanted = [(stride, _turn(number, count, stride)) for stride in strides]
        free = (place for place in range(span) if place not in used)
        best = min(free, key=lambda place: (_distance(place, wanted), place))
        chosen.append(best)
        used.add(best)
    return tuple(sorted(chosen))


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


class NeutralTexts:
    """Makes neutral text for one tokenizer, and remembers what worked: the search is long for long shifts.

    Args:
        tokenizer: of the model; None: `unit`, repeated, is believed to be a token each.
        unit: neutral text of one token; tried last where a tokenizer is known.
    """

    def __init__(self, tokenizer: Counts | None, unit: str = DEFAULT_UNIT) -> None:
        self._tokenizer, self._unit = tokenizer, unit
        self._worked: dict[int, str] = {}

    def text(self, shift_tokens: int, before: str) -> str:
        """Text that puts exactly so many tokens before a text and leaves the text's own tokens as they are.

        Args:
            shift_tokens: >= 0.
            before: the text that it will stand before; only its beginning is looked at.

        Returns:
            The neutral text, to be joined with `before`; empty for 0.

        Raises:
            IsophaseError: no repeated white space, nor the unit, makes so many tokens there.
        """
        if shift_tokens == 0:
            return ""
        if self._tokenizer is None:
            return self._unit * shift_tokens
        place = _Place(self._tokenizer, before[:_HEAD_CHARACTERS])
        known = self._worked.get(shift_tokens)
        if known and place.is_moved(known, shift_tokens, len(_BEHIND) - 1):
            return known
        for lefts in (len(_BEHIND), len(_BEHIND) - 1, 1):
            for unit in (*_WHITE_UNITS, self._unit):
                if text := place.search(unit, shift_tokens, lefts):
                    self._worked[shift_tokens] = text
                    return text
        raise IsophaseError(
            f"no neutral text makes exactly {shift_tokens} tokens before {before[:20]!r} with this tokenizer.",
            "Give --unit a word of one token.",
        )


class _Place:
    """The beginning of a text, behind whatever a chat template may put there."""

    def __init__(self, tokenizer: Counts, head: str) -> None:
        self._tokenizer, self._head = tokenizer, head
        self._plain = [tokenizer.encode(left + head) for left in _BEHIND]

    def is_moved(self, text: str, tokens: int, lefts: int) -> bool:
        """Whether a text makes so many tokens behind the first `lefts` of `_BEHIND`."""
        ids = self._tokenizer.encode(text + self._head)
        if len(ids) != tokens + len(self._plain[0]) or ids[tokens:] != self._plain[0]:
            return False
        others = list(zip(_BEHIND, self._plain, strict=True))[1:lefts]
        return all(
            len(self._tokenizer.encode(left + text + self._head)) == tokens + len(plain) for left, plain in others
        )

    def search(self, unit: str, tokens: int, lefts: int) -> str:
        """As few repeats as are needed; empty where none will do."""
        for repeats in range(tokens, _MOST_UNITS_PER_TOKEN * tokens + 1):
            text = unit * repeats
            if self.is_moved(text, tokens, lefts):
                return text
            added = len(self._tokenizer.encode(text + self._head)) - len(self._plain[0])
            # The first is already too long, or all merge.
            if added > 2 * tokens + 8 or (repeats > tokens + 8 and added < tokens):
                break
        return ""


def _turn(number: int, count: int, stride: int) -> float:
    """Residue that shift `number` of `count` should take: spread out, or in turn where there are more shifts."""
    return number * stride / count if count <= stride else float(number % stride)


def _distance(place: int, wanted: Sequence[tuple[int, float]]) -> float:
    """How far a place is from what each stride wants, in strides."""
    total = 0.0
    for stride, residue in wanted:
        apart = abs(place % stride - residue)
        total += min(apart, stride - apart) / stride
    return total
