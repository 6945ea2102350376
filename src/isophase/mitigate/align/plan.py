"""The fewest neutral tokens that put every marked span at a strong phase and across no boundary.

Greedy, and an exact minimum: every span takes the smallest sum of insertions, not below that of the span before,
at which it is right. By induction no other choice has a smaller sum at any span, and the last sum is the cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isophase.errors import IsophaseError

TOLERANCE_POINTS = 5.0
"""A phase is strong if its accuracy is within so many points of the best one."""


class Span(NamedTuple):
    """Tokens that belong together: a record, a line, a marked passage."""

    start_tokens: int
    length_tokens: int


class Insertion(NamedTuple):
    """Neutral tokens, and the index of the token of the unaligned text that they go before."""

    at_tokens: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class AlignmentPlan:
    """What to insert, and what that changes.

    Attributes:
        stride_tokens: the stride.
        insertions: in order; none of zero tokens.
        starts_tokens: where each span starts afterwards, in the order of the spans.
        added_tokens: sum of the insertions.
        misplaced: spans that no insertion can put right: they share an opening with others that need another shift.
        misplaced_before: spans that were not right.
        straddling, straddling_before: spans that would fit between two boundaries and cross one.
    """

    stride_tokens: int
    insertions: tuple[Insertion, ...]
    starts_tokens: tuple[int, ...]
    added_tokens: int
    misplaced: int
    misplaced_before: int
    straddling: int
    straddling_before: int


def align(
    spans: Sequence[Span],
    stride_tokens: int,
    phase_accuracy: Sequence[float] = (),
    *,
    openings_tokens: Sequence[int] | None = None,
    tolerance_points: float = TOLERANCE_POINTS,
) -> AlignmentPlan:
    """Plan the insertions.

    Args:
        spans: in order, not overlapping, each of at least one token; starts count from the model's first token.
        stride_tokens: S >= 1.
        phase_accuracy: accuracy at each of the S phases, 0..1; empty: all phases are equally strong, and only
            boundaries matter.
        openings_tokens: indices of tokens before which neutral tokens may go, ascending; None: every span's start.
            Those inside of a span are not used.
        tolerance_points: see `TOLERANCE_POINTS`.

    Returns:
        The plan with the fewest misplaced spans, and among those the fewest tokens.

    Raises:
        IsophaseError: no such stride, or a curve of another length.
        ValueError: spans that overlap or are empty.
    """
    accuracy = _checked(spans, stride_tokens, phase_accuracy)
    starts = np.array([span.start_tokens for span in spans], dtype=np.int64)
    ok = np.array(
        [wanted_phases(span.length_tokens, stride_tokens, accuracy, tolerance_points) for span in spans], dtype=bool
    ).reshape(len(spans), stride_tokens)
    openings = _usable(spans, [span.start_tokens for span in spans] if openings_tokens is None else openings_tokens)
    groups = _groups(spans, openings)
    insertions, moved = [], starts.copy()
    total = 0
    for opening, members in groups:
        if opening is not None and (tokens := _least(starts[members] + total, ok[members])):
            insertions.append(Insertion(opening, tokens))
            total += tokens
        moved[members] += total
    return AlignmentPlan(
        stride_tokens=stride_tokens,
        insertions=tuple(insertions),
        starts_tokens=tuple(moved.tolist()),
        added_tokens=total,
        misplaced=_misplaced(moved, ok, stride_tokens),
        misplaced_before=_misplaced(starts, ok, stride_tokens),
        straddling=_straddling(moved, spans, stride_tokens),
        straddling_before=_straddling(starts, spans, stride_tokens),
    )


def wanted_phases(
    length_tokens: int, stride_tokens: int, accuracy: npt.NDArray[np.float64], tolerance_points: float
) -> npt.NDArray[np.bool_]:
    """Phases at which a span may start.

    A span that fits between two boundaries must not cross one: phases up to `S - length`, the strong ones of
    them, or if there are none, the best of them. A longer span crosses boundaries anyway: strong phases, or where
    nothing is known of phases, those at which it touches no more chunks than it must.

    Args:
        length_tokens: of the span, >= 1.
        stride_tokens: S.
        accuracy: float64 [S], or empty.
        tolerance_points: below the best, still strong.

    Returns:
        bool [S], at least one of them true.
    """
    phases = np.arange(stride_tokens)
    fewest_chunks: npt.NDArray[np.bool_] = phases <= -length_tokens % stride_tokens
    if not len(accuracy):
        return fewest_chunks
    strong: npt.NDArray[np.bool_] = accuracy >= accuracy.max() - tolerance_points / 100
    if length_tokens > stride_tokens:
        return strong
    both: npt.NDArray[np.bool_] = strong & fewest_chunks
    if not both.any():
        both = fewest_chunks & (accuracy == accuracy[fewest_chunks].max())
    return both


def _checked(spans: Sequence[Span], stride: int, phase_accuracy: Sequence[float]) -> npt.NDArray[np.float64]:
    if stride < 1:
        raise IsophaseError(f"the stride is {stride}; it must be at least 1.", "Give --stride 1 or more.")
    if len(phase_accuracy) not in (0, stride):
        raise IsophaseError(
            f"the curve has {len(phase_accuracy)} phases and the stride is {stride}.",
            "Leave out --stride: the curve brings its own.",
        )
    end = 0
    for span in spans:
        if span.start_tokens < end or span.length_tokens < 1:
            raise ValueError(f"{span} overlaps the span before it, or is empty")
        end = span.start_tokens + span.length_tokens
    return np.asarray(phase_accuracy, dtype=np.float64)


def _usable(spans: Sequence[Span], openings: Sequence[int]) -> list[int]:
    """Openings that split no span."""
    starts = [span.start_tokens for span in spans]
    kept = []
    for opening in openings:
        place = bisect_right(starts, opening) - 1
        span = spans[place] if place >= 0 else None
        if span is None or opening <= span.start_tokens or opening >= span.start_tokens + span.length_tokens:
            kept.append(opening)
    return sorted(set(kept))


def _groups(spans: Sequence[Span], openings: Sequence[int]) -> list[tuple[int | None, list[int]]]:
    """Spans that can only move together: those behind the same last opening."""
    groups: list[tuple[int | None, list[int]]] = []
    for number, span in enumerate(spans):
        place = bisect_right(openings, span.start_tokens) - 1
        opening = openings[place] if place >= 0 else None
        if groups and groups[-1][0] == opening:
            groups[-1][1].append(number)
        else:
            groups.append((opening, [number]))
    return groups


def _least(starts: npt.NDArray[np.int64], ok: npt.NDArray[np.bool_]) -> int:
    """Fewest tokens behind which as many of these spans as can be are right: starts [n], ok [n, S]."""
    stride = ok.shape[1]
    phases = (starts[:, None] + np.arange(stride)) % stride  # [span, tokens]
    return int(np.take_along_axis(ok, phases, axis=1).sum(axis=0).argmax())


def _misplaced(starts: npt.NDArray[np.int64], ok: npt.NDArray[np.bool_], stride: int) -> int:
    return int((~ok[np.arange(len(starts)), starts % stride]).sum())


def _straddling(starts: npt.NDArray[np.int64], spans: Sequence[Span], stride: int) -> int:
    lengths = np.array([span.length_tokens for span in spans], dtype=np.int64)
    return int(((lengths <= stride) & (starts % stride + lengths > stride)).sum())
