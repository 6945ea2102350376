"""What a needle run found: by method, by length and depth, by phase."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import BaseModel, ConfigDict

from isophase.needle.settings import NeedleSettings
from isophase.needle.store import NeedleAnswer
from isophase.statistics import FloatArray, IntArray, Observations, assess, wilson

MARGIN = 0.02


class Share(BaseModel):
    """An accuracy with its 95 % Wilson interval.

    Attributes:
        accuracy: share of right answers; None without answers.
        lower: lower bound.
        upper: upper bound.
        prompts: answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accuracy: float | None
    lower: float
    upper: float
    prompts: int


class PhaseVerdict(BaseModel):
    """Whether accuracy depends on the phase, as `isophase.statistics.assess` decides.

    Attributes:
        verdict: sensitive, none or inconclusive.
        gap_points: cross-fitted best minus worst phase.
        gap_interval_points: 95 %.
        p_values_adjusted: of the tests that were made.
        amplitude_upper: 95 % upper limit of half peak to trough.
        margin: smallest half peak to trough that matters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: str
    gap_points: float
    gap_interval_points: tuple[float, float]
    p_values_adjusted: dict[str, float]
    amplitude_upper: float
    margin: float = MARGIN


class MethodResult(BaseModel):
    """One method.

    Attributes:
        cache: as written.
        entries: entries kept in each KV head, largest over prompts.
        stored_bytes: mean bytes of keys and values.
        overall: all prompts.
        by_length: by length.
        cells: by length, then depth.
        by_phase: by residue of the needle's first token.
        log_probability: mean.
        phases: verdict; None while prompts are missing or with fewer than two items.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache: str
    entries: int
    stored_bytes: float
    overall: Share
    by_length: tuple[Share, ...]
    cells: tuple[tuple[Share, ...], ...]
    by_phase: tuple[Share, ...]
    log_probability: float | None
    phases: PhaseVerdict | None


class NeedleResult(BaseModel):
    """Everything that the report shows.

    Attributes:
        schema_version: of this file.
        settings: of the run.
        prompts: answered.
        span_tokens: tokens of the needle.
        methods: in the order asked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    settings: NeedleSettings
    prompts: int
    span_tokens: int
    methods: tuple[MethodResult, ...]


def summarise(
    settings: NeedleSettings, answers: Mapping[int, NeedleAnswer], span_tokens: int, margin: float = MARGIN
) -> NeedleResult:
    """Summarise the answers; a pure function.

    Args:
        settings: of the run.
        answers: by row; rows may be missing.
        span_tokens: tokens of the needle.
        margin: smallest swing over phases that matters, half peak to trough, 0 to 0.5.
    """
    methods = tuple(_method(settings, answers, span_tokens, margin, n) for n in range(len(settings.caches)))
    return NeedleResult(settings=settings, prompts=len(answers), span_tokens=span_tokens, methods=methods)


def _method(
    settings: NeedleSettings, answers: Mapping[int, NeedleAnswer], span: int, margin: float, n: int
) -> MethodResult:
    shape = (len(settings.lengths), settings.depths, settings.phases)
    right = np.full(shape, np.nan)
    position = np.zeros(shape, dtype=np.int64)
    for row, answer in answers.items():
        at = settings.place(row)
        right[at], position[at] = answer.correct[n], answer.position_tokens
    residue = position % settings.phases
    chosen = list(answers.values())
    return MethodResult(
        cache=settings.caches[n],
        entries=max((a.entries[n] for a in chosen), default=0),
        stored_bytes=float(np.mean([a.stored_bytes[n] for a in chosen])) if chosen else 0.0,
        overall=_share(right),
        by_length=tuple(_share(right[i]) for i in range(shape[0])),
        cells=tuple(tuple(_share(right[i, j]) for j in range(shape[1])) for i in range(shape[0])),
        by_phase=tuple(_share(right[residue == r]) for r in range(settings.phases)),
        log_probability=float(np.mean([a.log_probability[n] for a in chosen])) if chosen else None,
        phases=_verdict(right, position, settings, span, margin),
    )


def _share(values: FloatArray) -> Share:
    known = values.ravel()
    known = known[np.isfinite(known)]
    low, high = wilson(known.sum(), len(known))
    return Share(
        accuracy=float(known.mean()) if len(known) else None, lower=float(low), upper=float(high), prompts=len(known)
    )


def _verdict(
    right: FloatArray, position: IntArray, settings: NeedleSettings, span: int, margin: float
) -> PhaseVerdict | None:
    items = right.shape[0] * right.shape[1]
    if items < 2 or not np.isfinite(right).all():
        return None
    seen = Observations(outcomes=right.reshape(items, -1), positions=position.reshape(items, -1), span_tokens=span)
    found = assess(seen, settings.phases, margin=margin, periods=[settings.phases], seed=settings.seed)
    return PhaseVerdict(
        verdict=found.verdict,
        gap_points=found.gap_points,
        gap_interval_points=found.gap_interval_points,
        p_values_adjusted=found.p_values_adjusted,
        amplitude_upper=found.amplitude_upper,
        margin=margin,
    )
