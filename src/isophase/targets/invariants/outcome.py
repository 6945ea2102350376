"""What must hold in any target before a phase is blamed: the outcome of one check, and how cases become one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal, NamedTuple

InvariantStatus = Literal["pass", "fail", "not testable"]

MOST_RESIDUES = 16


@dataclass(frozen=True, kw_only=True)
class InvariantOutcome:
    """One check.

    Attributes:
        name: of the check.
        status: pass, fail or not testable.
        detail: what was compared, or why nothing could be.
        smallest_failing_input: the first case that failed, the smallest being tried first; empty where none did.
        cases: how many cases were tried.
        largest_difference: of all cases tried, in the check's unit; nan where nothing was measured.
        limit: what still counts as rounding.
        explanation: for a failure: what it means for answers, and what to do.
    """

    name: str
    status: InvariantStatus
    detail: str
    smallest_failing_input: str = ""
    cases: int = 0
    largest_difference: float = math.nan
    limit: float = math.nan
    explanation: str = ""


class Case(NamedTuple):
    """One input of a check, and what measures it."""

    label: str
    difference: Callable[[], float]


class NotTestableError(Exception):
    """This target does not offer what a check needs."""


def judge(name: str, detail: str, cases: Iterable[Case], limit: float, explanation: str = "") -> InvariantOutcome:
    """Try cases, the smallest first, up to the first that fails.

    A case that raises fails as well: a request that crashes is no better than one that is answered wrongly.
    `NotTestableError` ends the check without a verdict.

    Args:
        name: of the check.
        detail: what is compared.
        cases: in the order of their size.
        limit: largest difference that passes.
        explanation: for a failure.
    """
    largest, tried = math.nan, 0
    try:
        for case in cases:
            tried += 1
            try:
                difference = case.difference()
            except NotTestableError:
                raise
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
                return InvariantOutcome(
                    name=name,
                    status="fail",
                    detail=detail,
                    smallest_failing_input=f"{case.label}: {type(error).__name__}: {shorten(str(error), 120)}",
                    cases=tried,
                    largest_difference=largest,
                    limit=limit,
                    explanation=explanation,
                )
            largest = difference if math.isnan(largest) else max(largest, difference)
            if not difference <= limit:  # nan fails too
                return InvariantOutcome(
                    name=name,
                    status="fail",
                    detail=detail,
                    smallest_failing_input=case.label,
                    cases=tried,
                    largest_difference=difference,
                    limit=limit,
                    explanation=explanation,
                )
    except NotTestableError as reason:
        return InvariantOutcome(name=name, status="not testable", detail=str(reason))
    if not tried:
        return InvariantOutcome(name=name, status="not testable", detail="no input fits the context")
    return InvariantOutcome(
        name=name, status="pass", detail=detail, cases=tried, largest_difference=largest, limit=limit
    )


def residues_to_try(stride_tokens: int) -> Sequence[int]:
    """All residues of a short stride; of a long one both edges and some between, 16 in all."""
    if stride_tokens <= MOST_RESIDUES:
        return range(stride_tokens)
    inner = {round(k * (stride_tokens - 1) / (MOST_RESIDUES - 1)) for k in range(MOST_RESIDUES)}
    return sorted(inner | {1, stride_tokens - 2})
