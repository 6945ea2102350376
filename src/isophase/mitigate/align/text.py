"""Align a text: the plan in tokens, carried out in characters, and measured with the tokenizer afterwards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from isophase.errors import IsophaseError
from isophase.mitigate.align.formats import Marked, Opening, find, meaning
from isophase.mitigate.align.plan import Span, align
from isophase.targets.server import FileTokenizer

_ROUNDS = 6
"""Neutral text may merge with its neighbours; each round corrects by what was measured."""
_CONTEXT_CHARACTERS = 48
_MOST_UNITS_PER_TOKEN = 4


class Locating(Protocol):
    """A tokenizer that knows where its tokens start."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens that the model expects before any text."""

    def starts(self, text: str) -> list[int]:
        """Character at which each token of `text` starts, ascending; no special tokens."""


class LocatingTokenizer(FileTokenizer):
    """A `tokenizer.json` that also tells where tokens start."""

    def starts(self, text: str) -> list[int]:
        """Character at which each token of `text` starts."""
        return [start for start, _ in self._tokenizer.encode(text, add_special_tokens=False).offsets]


class Edit(NamedTuple):
    """Neutral text, and the character of the unaligned text that it goes before."""

    at: int
    text: str


@dataclass(frozen=True, kw_only=True)
class AlignedText:
    """An aligned text, as the tokenizer counts it.

    Attributes:
        text: with neutral text in it.
        edits: what was inserted, in order.
        spans: number of spans.
        tokens_before: of the unaligned text.
        added_tokens: measured, not planned.
        misplaced, misplaced_before: spans not at a phase where they should start.
        straddling, straddling_before: spans that would fit between two boundaries and cross one.
    """

    text: str
    edits: tuple[Edit, ...]
    spans: int
    tokens_before: int
    added_tokens: int
    misplaced: int
    misplaced_before: int
    straddling: int
    straddling_before: int


def align_text(
    text: str,
    tokenizer: Locating,
    stride_tokens: int,
    phase_accuracy: Sequence[float] = (),
    *,
    form: str = "text",
    mark: str | None = None,
    unit: str = "",
    offset_tokens: int | None = None,
) -> AlignedText:
    """Insert the fewest neutral tokens so that spans start at strong phases and cross no boundary.

    Args:
        text: the text.
        tokenizer: of the model.
        stride_tokens: S.
        phase_accuracy: see `align`.
        form: see `align_formats.find`, as are `mark` and `unit`.
        mark: regular expression of the spans.
        unit: visible neutral text.
        offset_tokens: tokens that the model reads before this text; None: its start-of-text.

    Returns:
        The text, which means what it did, and what was measured on it.

    Raises:
        IsophaseError: the text is not of the format, or a setting is wrong.
    """
    offset = len(tokenizer.prefix_ids) if offset_tokens is None else offset_tokens
    if offset < 0:
        raise IsophaseError(f"--offset is {offset}; it must be at least 0.", "Give 0 or more.")
    marked = find(text, form, mark=mark, unit=unit)
    before = _measure(text, marked, (), tokenizer, offset)
    plain = align(before.spans, stride_tokens, phase_accuracy)
    best: tuple[int, int, tuple[Edit, ...], str, _Measured] | None = None
    base, failed = before.spans, set[Opening]()
    for _ in range(_ROUNDS):
        nearest = _nearest(marked, failed)
        places = {base[number].start_tokens: (opening, marked.spans[number][0]) for number, opening in nearest.items()}
        plan = align(base, stride_tokens, phase_accuracy, openings_tokens=sorted(places))
        edits, cannot = [], set[Opening]()
        for place, tokens in plan.insertions:
            opening, anchor = places[place]
            made = _neutral(text, opening, anchor, tokens, tokenizer)
            if made is None:
                cannot.add(opening)
            else:
                edits.append(made)
        changed = apply(text, edits)
        after = _measure(changed, marked, edits, tokenizer, offset)
        wrong = align(after.spans, stride_tokens, phase_accuracy).misplaced_before
        added = after.tokens - before.tokens
        if best is None or (wrong, added) < best[:2]:
            best = (wrong, added, tuple(edits), changed, after)
        if not cannot and wrong <= plan.misplaced:
            break
        failed |= cannot
        if not cannot:
            base = _corrected(base, after.spans, plan.starts_tokens)
    assert best is not None
    wrong, added, done, changed, after = best
    if not (form == "text" and unit) and meaning(changed, form) != meaning(text, form):
        raise IsophaseError(f"neutral tokens would change this {form}.", "Give --format text.")
    return AlignedText(
        text=changed,
        edits=done,
        spans=len(before.spans),
        tokens_before=before.tokens,
        added_tokens=added,
        misplaced=wrong,
        misplaced_before=plain.misplaced_before,
        straddling=align(after.spans, stride_tokens, phase_accuracy).straddling_before,
        straddling_before=plain.straddling_before,
    )


def apply(text: str, edits: Sequence[Edit]) -> str:
    """The text with the edits in it."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.at], edit.text]
        at = edit.at
    return "".join([*parts, text[at:]])


def revert(text: str, edits: Sequence[Edit]) -> str:
    """The text without the edits; the inverse of `apply`.

    Raises:
        ValueError: an edit is not where it should be.
    """
    parts, at, shift = [], 0, 0
    for edit in edits:
        start = edit.at + shift
        if start < at or text[start : start + len(edit.text)] != edit.text:
            raise ValueError(f"there is no {edit.text!r} at character {start}")
        parts.append(text[at:start])
        at = start + len(edit.text)
        shift += len(edit.text)
    return "".join([*parts, text[at:]])


@dataclass(frozen=True)
class _Measured:
    """Spans of a text in tokens from the model's first one, and the number of the text's own tokens."""

    spans: list[Span]
    tokens: int


def _measure(text: str, marked: Marked, edits: Sequence[Edit], tokenizer: Locating, offset: int) -> _Measured:
    starts = tokenizer.starts(text)
    ats = [edit.at for edit in edits]
    moved = [0]
    for edit in edits:
        moved.append(moved[-1] + len(edit.text))
    spans: list[Span] = []
    end = 0
    for first, behind in marked.spans:
        start = _first_token(starts, first + moved[bisect_right(ats, first)])
        last = max(start, bisect_right(starts, behind - 1 + moved[bisect_left(ats, behind)]) - 1)
        # Two spans may share a token where they touch; it belongs to the first one.
        start = max(start, end)
        end = max(start, last) + 1
        spans.append(Span(offset + start, end - start))
    return _Measured(spans, len(starts))


def _first_token(starts: Sequence[int], character: int) -> int:
    """First of the tokens that hold a character (a character may be several tokens)."""
    place = bisect_right(starts, character) - 1
    return bisect_left(starts, starts[place]) if place >= 0 else 0


def _nearest(marked: Marked, failed: Container[Opening]) -> dict[int, Opening]:
    """The last usable opening before each span, by the span's number; not behind the start of the span before."""
    starts = [start for start, _ in marked.spans]
    found = {}
    for opening in marked.openings:
        number = bisect_left(starts, opening.before)
        splits = number > 0 and marked.spans[number - 1][1] > opening.before
        if number < len(starts) and not splits and opening not in failed:
            found[number] = opening
    return found


def _corrected(base: Sequence[Span], after: Sequence[Span], planned_starts: Sequence[int]) -> list[Span]:
    """Spans from where the plan would have come out as it was measured: merges are part of where they stand."""
    corrected: list[Span] = []
    end = 0
    for old, found, planned in zip(base, after, planned_starts, strict=True):
        start = max(end, old.start_tokens + found.start_tokens - planned)
        corrected.append(Span(start, found.length_tokens))
        end = start + found.length_tokens
    return corrected


def _neutral(text: str, opening: Opening, anchor: int, tokens: int, tokenizer: Locating) -> Edit | None:
    """Neutral text that moves the token of a character by exactly so many tokens; None if no site has any.

    Counting tokens would not do: white space may merge into the token that it should move.
    """
    for site in opening.sites:
        left = text[max(0, site.at - _CONTEXT_CHARACTERS) : site.at]
        right = text[site.at : anchor + _CONTEXT_CHARACTERS]
        inside = len(left) + anchor - site.at
        plain = _first_token(tokenizer.starts(left + right), inside)

        def moved(units: int) -> int:
            inserted = site.head + site.unit * units + site.tail  # noqa: B023 - called within this round only
            starts = tokenizer.starts(left + inserted + right)  # noqa: B023
            return _first_token(starts, inside + len(inserted)) - plain  # noqa: B023

        most = _MOST_UNITS_PER_TOKEN * tokens + 4
        if moved(most) < tokens:
            continue  # it merges
        for units in (tokens, *range(most + 1)):
            if moved(units) == tokens:
                return Edit(site.at, site.head + site.unit * units + site.tail)
    return None
