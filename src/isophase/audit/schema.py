"""The documented schema of `report.json`: what the statistics found, ready to be drawn.

`Report` is the file. Its top level repeats the fields of the first finding, so that a script can
read `verdict` or `gap_points` without knowing how many models or probes took part.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Verdict = Literal["sensitive", "none", "inconclusive"]
Interval = tuple[float, float]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PeriodTest(_Frozen):
    """One period of the scan."""

    period_tokens: int = Field(description="the period that is tried")
    z: float = Field(description="weighted Rayleigh statistic of harmonic 1; about Exp(1) under the null")
    p_value: float = Field(description="from cyclic shifts, this period alone")
    p_adjusted: float = Field(description="Westfall-Young min-P over all periods of the scan")
    amplitude: float = Field(description="half peak to trough of harmonic 1, accuracy units")
    amplitude_upper: float = Field(description="95 % upper limit of the amplitude")
    control: bool = Field(description="odd period: no compressor uses it")
    explained_by_tokens: int | None = Field(
        default=None, description="significant, but nothing is left of it beside this period, the one named"
    )


class BoundaryContrast(_Frozen):
    """Records that straddle a chunk edge against those that do not, paired within items."""

    straddling_accuracy: float = Field(description="of records that straddle a chunk edge")
    inside_accuracy: float = Field(description="of records inside a chunk")
    difference_points: float = Field(description="straddling minus inside, points")
    p_value: float = Field(description="from cyclic shifts")
    mcnemar_p_value: float = Field(
        description="McNemar's exact test on neighbouring positions; not used for the verdict"
    )


class TrendBin(_Frozen):
    """Accuracy by absolute target position."""

    first_position_tokens: int = Field(description="first position of the bin")
    last_position_tokens: int = Field(description="last position of the bin")
    accuracy: float = Field(description="share of right answers")
    interval: Interval = Field(description="95 %, Wilson")
    prompts: int = Field(description="answers that count")


class CompletionStrip(_Frozen):
    """The completion probe: which number the model prefers as the filler grows token by token."""

    families: list[str] = Field(description="kinds of program text")
    filler_tokens: list[int] = Field(description="lengths of the filler")
    p_right: list[list[float | None]] = Field(description="[family][length] probability of 8")
    p_wrong: list[list[float | None]] = Field(description="[family][length] probability of 32")
    right_wins_by_phase: list[float | None] = Field(description="share of rankings won by 8, by length mod period")
    rankings: int = Field(description="prompts that were answered")
    rankings_right: int = Field(description="of them, those won by 8")


class Finding(_Frozen):
    """What one probe found in one model."""

    role: Literal["target", "control"] = Field(description="the audited model, or the one it is compared with")
    target: str = Field(description="the model's spec")
    probe: str = Field(description="the probe's name")
    verdict: Verdict = Field(description="whether accuracy depends on the phase")
    sentence: str = Field(description="the verdict in one sentence, for people")
    reasons: list[str] = Field(description="why this verdict; also why it is weaker than hoped")
    advice: list[str] = Field(description="what to do next")
    stride_tokens: int | None = Field(description="stride that the test was told; null: scanned")
    stride_source: Literal["configuration", "given", "scan"] = Field(description="where the stride comes from")
    period_tokens: int | None = Field(description="period found; null where none was")
    scan_period_tokens: int | None = Field(
        default=None,
        description="period that the scan, told nothing, names by itself; also where it does not decide",
    )
    grids: list[str] = Field(default=[], description="compression grids that the model's configuration names")
    axis_tokens: int = Field(description="length of the phase axis: the period found, else the stride, else 8")
    accuracy: float = Field(description="share of right answers over all phases")
    accuracy_interval: Interval = Field(description="95 %, Wilson")
    accuracy_by_phase: list[float | None] = Field(
        description="[phase] share of right answers; null where nothing was asked"
    )
    interval_by_phase: list[Interval] = Field(description="[phase] 95 %, Wilson")
    prompts_by_phase: list[int] = Field(description="[phase] answers that count")
    log_probability_by_phase: list[float | None] = Field(
        description="[phase] mean natural log of the right answer's probability"
    )
    worst_phase: int | None = Field(description="phase with the lowest accuracy")
    best_phase: int | None = Field(description="phase with the highest accuracy")
    weak_phases: list[int] = Field(description="phases whose interval lies below the mean accuracy")
    boundary_phases: list[int] = Field(description="phases at which the record straddles a chunk edge")
    gap_points: float = Field(description="cross-fitted best minus worst, points")
    gap_interval_points: Interval = Field(description="95 %, bootstrap over items")
    raw_gap_points: float = Field(description="max - min as the field reports it; biased upward")
    p_values: dict[str, float] = Field(description="harmonic, omnibus, boundary; or scan")
    p_values_adjusted: dict[str, float] = Field(
        description="the same, counting that several tests were made; the verdict uses these"
    )
    amplitude: float = Field(description="half peak to trough of harmonic 1")
    amplitude_debiased: float = Field(description="corrected for noise")
    amplitude_upper: float = Field(description="95 % upper limit")
    harmonic_phase_radians: float = Field(description="the fit is accuracy + amplitude cos(2 pi r / axis - this)")
    margin: float = Field(description="smallest amplitude that matters")
    boundary: BoundaryContrast | None = Field(
        description="records across a chunk edge against the others; null where there is no edge"
    )
    scan: list[PeriodTest] = Field(description="every period that was tried")
    scan_line_z: float | None = Field(description="z above which a period is significant, family-wise 5 %")
    trend: list[TrendBin] = Field(description="accuracy along the context")
    heat_map: list[list[float | None]] = Field(description="[item][residue mod axis] mean outcome")
    completion: CompletionStrip | None = Field(description="of the completion probe; null for others")
    prompts: int = Field(description="prompts that were answered and count")
    items: int = Field(description="items with an answer at every position; the tests use these")
    items_always_right: int | None = Field(
        default=None, description="of them, items that are right at every position; null in reports of older versions"
    )
    items_never_right: int | None = Field(
        default=None, description="items that are wrong at every position: lost, but not by the phase"
    )
    dropped_items: int = Field(default=0, description="items left out because an answer is missing")
    records: int = Field(description="records in a prompt")
    length_tokens: int = Field(description="length of a prompt")
    reads: int = Field(default=1, description="times that a prompt is read for one answer; more where the target votes")
    statuses: dict[str, int] = Field(description="ok, wrong_format, truncated, error")
    repeats: int = Field(default=0, description="prompts that were asked a second time; servers only")
    flips: int = Field(default=0, description="repeats that were answered otherwise than the first time")
    more_prompts_to_decide: int | None = Field(
        description="about how many more would decide an inconclusive finding; null where none would"
    )
    seed: int = Field(description="decides prompts and their order")
    seconds: float = Field(
        description="time that the model took to answer; the only field that may differ between equal runs"
    )


class Report(Finding):
    """`report.json`: the first finding at the top level, then everything."""

    schema_version: int = Field(description="version of this schema")
    isophase_version: str = Field(description="version that wrote the file")
    control: Finding | None = Field(description="the same probe on the control model")
    findings: list[Finding] = Field(description="every target and probe, the first one included")
    notes: list[str] = Field(description="limits of this run that a reader must know")
