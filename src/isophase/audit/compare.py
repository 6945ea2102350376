"""Two runs on the same items, paired."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from isophase.audit.analyse import build_report, observe
from isophase.audit.plan import OpenTarget
from isophase.audit.run import load_run
from isophase.audit.settings import Part, Plan
from isophase.errors import IsophaseError
from isophase.probes import Probe, Tokenizer
from isophase.statistics import paired_contrast


class Comparison(BaseModel):
    """First run minus second, by probe's lead part. Points are percentage points.

    Attributes:
        first: target of the first run.
        second: target of the second run.
        probe: probe that both were asked.
        axis_tokens: period of the phase axis, from the first run's report.
        items: items answered completely in both.
        accuracy: of both runs.
        gap_points: cross-fitted gap of both runs.
        accuracy_difference_points: with `accuracy_interval_points`.
        gap_difference_points: with `gap_interval_points`.
        difference_by_phase_points: accuracy difference by phase.
        p_values: shift tests of the difference, `harmonic` and `omnibus`.
        sentence: the result for people.
    """

    model_config = ConfigDict(frozen=True)

    first: str
    second: str
    probe: str
    axis_tokens: int
    items: int
    accuracy: tuple[float, float]
    gap_points: tuple[float, float]
    accuracy_difference_points: float
    accuracy_interval_points: tuple[float, float]
    gap_difference_points: float
    gap_interval_points: tuple[float, float]
    difference_by_phase_points: list[float]
    p_values: dict[str, float]
    sentence: str

    def rows(self) -> list[str]:
        """Lines for the terminal."""
        low, high = self.accuracy_interval_points
        gap_low, gap_high = self.gap_interval_points
        lines = [
            f"accuracy   {self.accuracy[0]:.3f} against {self.accuracy[1]:.3f}, "
            f"difference {self.accuracy_difference_points:+.1f} points (95 % {low:+.1f} to {high:+.1f})",
            f"gap        {self.gap_points[0]:.1f} against {self.gap_points[1]:.1f} points, "
            f"difference {self.gap_difference_points:+.1f} (95 % {gap_low:+.1f} to {gap_high:+.1f})",
            "p-values   " + ", ".join(f"{name} {p:.2g}" for name, p in self.p_values.items()),
            "by phase   " + "  ".join(f"{r}: {d:+.1f}" for r, d in enumerate(self.difference_by_phase_points)),
        ]
        return lines


def compare_runs(first: Path, second: Path, opener: Callable[[Plan], OpenTarget]) -> Comparison:
    """The paired contrast of the lead findings of two runs.

    Args:
        first: run folder; its first part is compared, its report decides the phase axis.
        second: run folder; the first part that was asked the same items is compared. The same folder
            again: the first such part of another model.
        opener: gives an opener of the targets of a plan.

    Returns:
        The contrast.

    Raises:
        IsophaseError: if a run is not complete or did not ask the same items.
    """
    reports, seen = [], []
    parts: list[Part] = []
    for folder in (first, second):
        plan, answers, _ = load_run(folder)
        open_target = opener(plan)

        def tokenizer_of(spec: str, open_target: OpenTarget = open_target) -> Tokenizer:
            return open_target(spec).tokenizer

        reports.append(build_report(folder, tokenizer_of))
        one_run = first.resolve() == second.resolve()
        part = _matching_part(plan, parts[0], folder, one_run) if parts else plan.parts[0]
        parts.append(part)
        seen.append(observe(part, answers, tokenizer_of(part.target)))
    try:
        _check_prompts(seen[0].probe, seen[1].probe)
        found = paired_contrast(
            seen[0].observations, seen[1].observations, reports[0].axis_tokens, seed=parts[0].probe.seed
        )
    except ValueError as error:
        raise IsophaseError(
            f"{str(first)!r} and {str(second)!r} cannot be compared: {error}.",
            "Audit both models with the same options and --seed.",
        ) from error
    a, b = (
        next(f for f in report.findings if f.target == part.target and f.probe == part.probe.probe)
        for report, part in zip(reports, parts, strict=True)
    )
    low, high = found.gap_interval_points
    differs = found.omnibus_p_value < 0.05
    sentence = (
        f"{a.target} and {b.target} {'differ' if differs else 'do not differ detectably'} "
        "in how accuracy depends on "
        f"the phase (p = {found.omnibus_p_value:.2g}): gap {found.gap_points:+.1f} points "
        f"(95 % {low:+.1f} to {high:+.1f}), "
        f"accuracy {found.accuracy_points:+.1f} points, on {found.items} items."
    )
    return Comparison(
        first=a.target,
        second=b.target,
        probe=a.probe,
        axis_tokens=found.axis_tokens,
        items=found.items,
        accuracy=(a.accuracy, b.accuracy),
        gap_points=(a.gap_points, b.gap_points),
        accuracy_difference_points=found.accuracy_points,
        accuracy_interval_points=found.accuracy_interval_points,
        gap_difference_points=found.gap_points,
        gap_interval_points=found.gap_interval_points,
        difference_by_phase_points=found.by_phase_points,
        p_values={"harmonic": found.harmonic_p_value, "omnibus": found.omnibus_p_value},
        sentence=sentence,
    )


def _matching_part(plan: Plan, other: Part, folder: Path, one_run: bool) -> Part:
    """The part that asked what `other` asked; within one run, of another model if there is one."""
    matching = [part for part in plan.parts if part.probe == other.probe]
    if one_run:
        matching.sort(key=lambda part: part.target == other.target)
    if matching:
        return matching[0]
    raise IsophaseError(
        f"no part of {str(folder)!r} asked the same prompts ({other.probe.probe}, {other.probe.items} items, "
        f"{other.probe.records} records, {other.probe.length_tokens} tokens, seed {other.probe.seed}).",
        "Audit both models with the same options and --seed.",
    )


def _check_prompts(first: Probe, second: Probe) -> None:
    """Equal settings give equal prompts only with equal tokenizers.

    Raises:
        ValueError: if an item differs.
    """
    for item in range(first.items):
        ids, others = (probe.prompt(item * probe.window_tokens).ids for probe in (first, second))
        if not np.array_equal(ids, others):
            raise ValueError("the models were asked different token ids, because their tokenizers differ")
