"""From a run folder to a report: a pure function of plan, answers and manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from isophase import __version__
from isophase.audit import words
from isophase.audit.run import load_run
from isophase.audit.schema import (
    SCHEMA_VERSION,
    BoundaryContrast,
    CompletionStrip,
    Finding,
    PeriodTest,
    Report,
    TrendBin,
)
from isophase.audit.settings import Part, Plan
from isophase.audit.store import ANSWERS, MANIFEST
from isophase.errors import IsophaseError
from isophase.probes import SHORTEST_TOKENS, CompletionProbe, Probe, Tokenizer, build_probe
from isophase.statistics import Assessment, Observations, assess, wilson
from isophase.targets import Answer, AnswerStatus

_TREND_BINS = 8


def build_report(folder: Path, tokenizer_of: Callable[[str], Tokenizer]) -> Report:
    """Assess a complete run.

    Args:
        folder: the run folder.
        tokenizer_of: gives the tokenizer of a target spec; with the plan it rebuilds the positions.

    Returns:
        The report; the same bytes for the same folder.

    Raises:
        IsophaseError: if the run is not complete.
    """
    plan, answers, manifest = load_run(folder)
    if manifest is None:
        raise IsophaseError(
            f"the run in {str(folder)!r} is not complete: {len(answers)} of {plan.rows} prompts are answered.",
            "Repeat the `isophase audit` command that began it; it resumes.",
        )
    missing = sum(row not in answers for row in range(plan.rows))
    if missing:
        raise IsophaseError(
            f"{str(folder / ANSWERS)!r} is damaged: {missing} of {plan.rows} answers are missing from a complete run.",
            f"Restore it; or remove {MANIFEST} there and repeat the `isophase audit` command that began the run.",
        )
    findings = [analyse_part(plan, part, answers, tokenizer_of(part.target), manifest) for part in plan.parts]
    lead = findings[0]
    control = next((f for f in findings if f.role == "control" and f.probe == lead.probe), None)
    return Report(
        **dict(lead),
        schema_version=SCHEMA_VERSION,
        isophase_version=__version__,
        control=control,
        findings=findings,
        notes=[*plan.notes, *words.limits(plan), *words.conditions(findings, manifest)],
    )


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A part's answers as the statistics read them.

    Attributes:
        probe: the rebuilt probe.
        rows: answers in row order.
        observations: outcomes [items, window] with their positions; nan where nothing can be judged.
        log_probabilities: [items, window], nan where unknown.
        length_tokens: tokens of a prompt.
    """

    probe: Probe
    rows: list[Answer]
    observations: Observations
    log_probabilities: npt.NDArray[np.float64]
    length_tokens: int


def observe(part: Part, answers: Mapping[int, Answer], tokenizer: Tokenizer) -> Observed:
    """Lay a part's answers out by item and position."""
    probe = build_probe(part.probe, tokenizer)
    rows = [answers[row] for row in range(part.first_row, part.first_row + part.rows)]
    width = probe.window_tokens
    # One prompt at a time: a long one takes megabytes.
    starts = [probe.prompt(item * width).position_tokens for item in range(probe.items)]
    positions = np.array(starts)[:, None] + np.arange(width)
    first = probe.prompt(0)
    outcomes = _outcomes(rows, part.probe.probe).reshape(probe.items, width)
    return Observed(
        probe=probe,
        rows=rows,
        observations=Observations(outcomes, positions, first.span_tokens),
        log_probabilities=np.array([a.log_probability for a in rows]).reshape(probe.items, width),
        length_tokens=len(first.ids),
    )


def analyse_part(
    plan: Plan,
    part: Part,
    answers: Mapping[int, Answer],
    tokenizer: Tokenizer,
    manifest: Mapping[str, Any],
) -> Finding:
    """One finding: one probe on one model."""
    seen = observe(part, answers, tokenizer)
    outcomes, positions = seen.observations.outcomes, seen.observations.positions
    complete = seen.observations.complete().outcomes
    rows, probe = seen.rows, seen.probe
    settings = plan.settings
    has_control = any(other.role == "control" and other.probe == part.probe for other in plan.parts)
    result = assess(
        seen.observations,
        part.stride_tokens,
        margin=settings.margin,
        shifts=settings.shifts,
        seed=part.probe.seed,
        log_probabilities=seen.log_probabilities,
        controls=part.control_periods,
    )
    statuses: Counter[str] = Counter(a.status for a in rows)
    strip = _strip(probe, rows, result.axis_tokens) if isinstance(probe, CompletionProbe) else None
    return Finding(
        role=part.role,
        target=part.target,
        probe=part.probe.probe,
        verdict=result.verdict,
        sentence=words.sentence(part, result),
        reasons=words.reasons(part, result),
        advice=words.advice(part, result, has_control=has_control),
        stride_tokens=part.stride_tokens,
        stride_source=part.stride_source,
        period_tokens=result.period_tokens,
        scan_period_tokens=result.scan_period_tokens,
        grids=list(part.grids),
        axis_tokens=result.axis_tokens,
        accuracy=result.accuracy,
        accuracy_interval=result.accuracy_interval,
        accuracy_by_phase=result.accuracy_by_phase,
        interval_by_phase=result.interval_by_phase,
        prompts_by_phase=result.prompts_by_phase,
        log_probability_by_phase=result.log_probability_by_phase,
        worst_phase=result.worst_phase,
        best_phase=result.best_phase,
        weak_phases=result.weak_phases,
        boundary_phases=result.boundary_phases,
        gap_points=result.gap_points,
        gap_interval_points=result.gap_interval_points,
        raw_gap_points=result.raw_gap_points,
        p_values=result.p_values,
        p_values_adjusted=result.p_values_adjusted,
        amplitude=result.amplitude,
        amplitude_debiased=result.amplitude_debiased,
        amplitude_upper=result.amplitude_upper,
        harmonic_phase_radians=result.harmonic_phase_radians,
        margin=result.margin,
        boundary=_boundary(result),
        scan=[
            PeriodTest(
                period_tokens=t.period_tokens,
                z=t.z,
                p_value=t.p_value,
                p_adjusted=t.p_adjusted,
                amplitude=t.amplitude,
                amplitude_upper=t.amplitude_upper,
                control=t.control,
                explained_by_tokens=t.explained_by_tokens,
            )
            for t in result.scan
        ],
        scan_line_z=result.scan_line_z,
        trend=_trend(outcomes, positions),
        heat_map=_heat_map(outcomes, positions, result.axis_tokens),
        completion=strip,
        prompts=result.prompts,
        items=result.items,
        items_always_right=int((complete == 1).all(axis=1).sum()),
        items_never_right=int((complete == 0).all(axis=1).sum()),
        dropped_items=result.dropped_items,
        records=part.probe.records,
        length_tokens=seen.length_tokens,
        reads=len(_facts(manifest, part).get("vote_shifts", [0])),
        repeats=sum(a.repeat_agrees is not None for a in rows),
        flips=sum(a.repeat_agrees is False for a in rows),
        statuses={status: statuses[status] for status in get_args(AnswerStatus) if statuses[status]},
        more_prompts_to_decide=result.more_prompts_to_decide,
        seed=part.probe.seed,
        seconds=_seconds(manifest, part),
    )


def _facts(manifest: Mapping[str, Any], part: Part) -> Mapping[str, Any]:
    """What the manifest says of a part."""
    facts = manifest.get("parts", {}).get(f"{part.target} {part.probe.probe}", {})
    return facts if isinstance(facts, Mapping) else {}


def _seconds(manifest: Mapping[str, Any], part: Part) -> float:
    try:
        return float(_facts(manifest, part)["seconds"])
    except (KeyError, TypeError, ValueError) as error:
        raise IsophaseError(
            f"{MANIFEST} is damaged: it does not say how long {part.target} took on {part.probe.probe}.",
            "Remove it and repeat the `isophase audit` command that began the run; no answer is lost.",
        ) from error


def _outcomes(rows: list[Answer], probe: str) -> npt.NDArray[np.float64]:
    """1 right, 0 wrong, nan where there is no answer to judge."""
    if probe == "completion":
        # The probe asks which of two numbers the model prefers, not whether either is its first choice.
        return np.array(
            [
                float(a.log_probability > a.choice_log_probabilities[0]) if a.choice_log_probabilities else np.nan
                for a in rows
            ]
        )
    return np.array([float(a.correct) if a.status in ("ok", "wrong_format") else np.nan for a in rows])


def _boundary(result: Assessment) -> BoundaryContrast | None:
    found = result.boundary
    if found is None:
        return None
    return BoundaryContrast(
        straddling_accuracy=found.straddling_accuracy,
        inside_accuracy=found.inside_accuracy,
        difference_points=found.difference_points,
        p_value=found.p_value,
        mcnemar_p_value=found.mcnemar_p_value,
    )


def _trend(outcomes: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]) -> list[TrendBin]:
    """Accuracy by absolute position, in bins of about equal counts."""
    answered = np.isfinite(outcomes)
    where, what = positions[answered], outcomes[answered]
    if not len(where):
        return []
    order = np.argsort(where, kind="stable")
    bins = []
    for members in np.array_split(order, min(_TREND_BINS, len(order))):
        n, hits = len(members), float(what[members].sum())
        low, high = wilson(hits, n)
        bins.append(
            TrendBin(
                first_position_tokens=int(where[members].min()),
                last_position_tokens=int(where[members].max()),
                accuracy=hits / n,
                interval=(float(low), float(high)),
                prompts=n,
            )
        )
    return bins


def _heat_map(
    outcomes: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], axis: int
) -> list[list[float | None]]:
    """Mean outcome by item and residue; None where there is no answer."""
    table: list[list[float | None]] = []
    for item_outcomes, item_positions in zip(outcomes, positions, strict=True):
        row: list[float | None] = []
        for residue in range(axis):
            here = item_outcomes[(item_positions % axis == residue) & np.isfinite(item_outcomes)]
            row.append(float(here.mean()) if len(here) else None)
        table.append(row)
    return table


def _strip(probe: CompletionProbe, rows: list[Answer], axis: int) -> CompletionStrip:
    """Probabilities of the right and the wrong number by filler family and length."""
    lengths = [SHORTEST_TOKENS + column for column in range(probe.window_tokens)]
    right = np.exp([a.log_probability for a in rows]).reshape(probe.items, -1)
    wrong = np.exp([a.choice_log_probabilities[0] if a.choice_log_probabilities else np.nan for a in rows])
    wrong = wrong.reshape(right.shape)
    wins = right > wrong
    phases = np.array(lengths) % axis
    return CompletionStrip(
        families=list(probe.families),
        filler_tokens=lengths,
        p_right=_or_none(right),
        p_wrong=_or_none(wrong),
        right_wins_by_phase=[float(wins[:, phases == r].mean()) if (phases == r).any() else None for r in range(axis)],
        rankings=int(wins.size),
        rankings_right=int(wins.sum()),
    )


def _or_none(table: npt.NDArray[np.float64]) -> list[list[float | None]]:
    return [[float(v) if np.isfinite(v) else None for v in row] for row in table]
