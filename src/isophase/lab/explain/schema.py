"""The documented schema of `explain.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Interval = tuple[float, float]
CauseName = Literal["slot", "straddle", "anchor", "visibility"]
Effect = Literal["removes", "reduces", "no change", "enlarges", "nothing to remove", "cannot tell", "not applicable"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Curve(_Frozen):
    """Accuracy by phase, with its gap."""

    accuracy: float
    by_phase: list[float]
    interval_by_phase: list[Interval] = Field(description="95 %, Wilson")
    gap_points: float = Field(description="cross-fitted best minus worst phase, points")
    gap_interval_points: Interval


class Knockout(_Frozen):
    """One unit replaced by its mean at the answering position."""

    kind: Literal["layer", "kv_head", "query_head"]
    name: str
    layer: int
    head: int | None = Field(description="index of the KV head or query head; null for a whole layer")
    is_kv_head: bool = Field(description="a KV head, or a layer whose query heads share one KV head")
    after: Curve
    lost_share_by_phase: list[float | None] = Field(
        description="1 - after / before; null where the accuracy before is too low to lose any"
    )
    lost_share_interval_by_phase: list[Interval | None] = Field(description="95 %, paired bootstrap over items")
    selective: bool = Field(description="loses more than half at some phases and less than a tenth at others")
    surely_selective: bool = Field(description="the same by the bounds of the intervals")


class GateProfile(_Frozen):
    """Mean gate weights of one KV head, and how concentrated they are."""

    layer: int
    branch: str = Field(description="keys, values, keys and values (tied), or indexer")
    kv_head: int
    weight_by_offset: list[float]
    static_slots: float = Field(description="exp(H(E[a])): effective number of slots of the mean weights")
    per_window_slots: float = Field(description="E[exp(H(a))]: effective number of slots of one window")


class TrainingStep(_Frozen):
    """Gates at one checkpoint of the training."""

    step: int
    gates: list[GateProfile]


class CyclingShift(_Frozen):
    """One roll of the parameters."""

    delta_tokens: int
    predicted_by_phase: list[float] = Field(description="the original curve, rolled by delta")
    observed: Curve
    r_squared: float | None = Field(description="1 - residual / total sum of squares over all phases, nothing fitted")
    r_squared_without_boundary: float | None = Field(description="the boundary phases left out")


class PooledFit(_Frozen):
    """All rolls together."""

    phases: Literal["all", "without boundary", "without boundary and its image"]
    r_squared: float | None
    r_squared_interval: Interval | None = Field(description="95 %, bootstrap over items")
    correlation_squared: float | None


class Cycling(_Frozen):
    """Gate cycling with one choice of parameters."""

    parameters: Literal["gates", "gates and payloads"]
    shifts: list[CyclingShift]
    pooled: list[PooledFit]
    rolls: list[int] = Field(description="all rolls that the two curves below average over")
    complete: bool = Field(description="whether these are all S rolls, so that the two parts separate exactly")
    moving: Curve = Field(description="accuracy by the offset that the parameters came from: what moves with them")
    staying: Curve = Field(description="accuracy by phase, averaged over the rolls: what does not move")


class Intervention(_Frozen):
    """One change that takes a cause away, and what became of the gap."""

    name: str
    before: Curve | None
    after: Curve | None
    change_points: float | None = Field(description="gap before minus gap after")
    change_interval_points: Interval | None = Field(description="95 %, paired bootstrap over items")
    effect: Effect
    meaning: str


class Cause(_Frozen):
    """One of the four causes."""

    cause: CauseName
    interventions: list[Intervention]
    conclusion: str


class Explanation(_Frozen):
    """`explain.json`."""

    schema_version: int = SCHEMA_VERSION
    isophase_version: str
    model: str
    model_type: str
    probe: str
    items: int
    prompts: int
    records: int
    length_tokens: int
    seed: int
    stride_tokens: int | None = Field(description="of the compressor; null without one")
    window_tokens: int | None
    axis_tokens: int = Field(description="length of the phase axis: the stride, or what was asked for")
    span_tokens: int = Field(description="length of the queried record")
    boundary_phases: list[int] = Field(description="phases at which the record straddles a chunk edge")
    baseline: Curve
    knockouts: list[Knockout]
    gates: list[GateProfile]
    training: list[TrainingStep] = Field(description="gates through training, where checkpoints were given")
    cycling: list[Cycling]
    causes: list[Cause]
    summary: list[str] = Field(description="the findings in sentences")
    notes: list[str] = Field(description="limits that a reader must know")
