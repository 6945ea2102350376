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

    accuracy: float = Field(description="share of right answers over all phases")
    by_phase: list[float] = Field(description="[phase] share of right answers")
    interval_by_phase: list[Interval] = Field(description="95 %, Wilson")
    gap_points: float = Field(description="cross-fitted best minus worst phase, points")
    gap_interval_points: Interval = Field(description="95 %, bootstrap over items")


class Knockout(_Frozen):
    """One unit replaced by its mean at the answering position."""

    kind: Literal["layer", "kv_head", "query_head"] = Field(description="what was taken out")
    name: str = Field(description="in words")
    layer: int = Field(description="index of the layer")
    head: int | None = Field(description="index of the KV head or query head; null for a whole layer")
    is_kv_head: bool = Field(description="a KV head, or a layer whose query heads share one KV head")
    after: Curve = Field(description="accuracy without it")
    lost_share_by_phase: list[float | None] = Field(
        description="1 - after / before; null where the accuracy before is too low to lose any"
    )
    lost_share_interval_by_phase: list[Interval | None] = Field(description="95 %, paired bootstrap over items")
    selective: bool = Field(description="loses more than half at some phases and less than a tenth at others")
    surely_selective: bool = Field(description="the same by the bounds of the intervals")


class GateProfile(_Frozen):
    """Mean gate weights of one KV head, and how concentrated they are."""

    layer: int = Field(description="index of the layer")
    branch: str = Field(description="keys, values, keys and values (tied), or indexer")
    kv_head: int = Field(description="index of the KV head")
    weight_by_offset: list[float] = Field(description="[offset] mean softmax weight")
    static_slots: float = Field(description="exp(H(E[a])): effective number of slots of the mean weights")
    per_window_slots: float = Field(description="E[exp(H(a))]: effective number of slots of one window")


class TrainingStep(_Frozen):
    """Gates at one checkpoint of the training."""

    step: int = Field(description="of the training")
    gates: list[GateProfile] = Field(description="mean gate weights at that step")


class CyclingShift(_Frozen):
    """One roll of the parameters."""

    delta_tokens: int = Field(description="by how many offsets the parameters were rolled")
    predicted_by_phase: list[float] = Field(description="the original curve, rolled by delta")
    observed: Curve = Field(description="accuracy with rolled parameters")
    r_squared: float | None = Field(description="1 - residual / total sum of squares over all phases, nothing fitted")
    r_squared_without_boundary: float | None = Field(description="the boundary phases left out")


class PooledFit(_Frozen):
    """All rolls together."""

    phases: Literal["all", "without boundary", "without boundary and its image"] = Field(
        description="phases that are fitted"
    )
    r_squared: float | None = Field(description="1 - residual / total sum of squares, nothing fitted")
    r_squared_interval: Interval | None = Field(description="95 %, bootstrap over items")
    correlation_squared: float | None = Field(description="between predicted and observed accuracy")


class Cycling(_Frozen):
    """Gate cycling with one choice of parameters."""

    parameters: Literal["gates", "gates and payloads"] = Field(description="what was rolled")
    shifts: list[CyclingShift] = Field(description="the rolls that the page shows")
    pooled: list[PooledFit] = Field(description="fits over all rolls, by set of phases")
    rolls: list[int] = Field(description="all rolls that the two curves below average over")
    complete: bool = Field(description="whether these are all S rolls, so that the two parts separate exactly")
    moving: Curve = Field(description="accuracy by the offset that the parameters came from: what moves with them")
    staying: Curve = Field(description="accuracy by phase, averaged over the rolls: what does not move")


class Intervention(_Frozen):
    """One change that takes a cause away, and what became of the gap."""

    name: str = Field(description="what was changed")
    before: Curve | None = Field(description="accuracy without the change")
    after: Curve | None = Field(description="accuracy with the change")
    change_points: float | None = Field(description="gap before minus gap after")
    change_interval_points: Interval | None = Field(description="95 %, paired bootstrap over items")
    effect: Effect = Field(description="what became of the gap")
    meaning: str = Field(description="the same in a sentence")


class Cause(_Frozen):
    """One of the four causes."""

    cause: CauseName = Field(description="its name")
    interventions: list[Intervention] = Field(description="changes that take it away")
    conclusion: str = Field(description="what they show, in one sentence")


class Explanation(_Frozen):
    """`explain.json`."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this schema")
    isophase_version: str = Field(description="version that wrote the file")
    model: str = Field(description="as given")
    model_type: str = Field(description="of the model's configuration")
    probe: str = Field(description="the probe's name")
    items: int = Field(description="sets of records with one question")
    prompts: int = Field(description="prompts of one measurement")
    records: int = Field(description="records in a prompt")
    length_tokens: int = Field(description="length of a prompt")
    seed: int = Field(description="decides prompts and all resamples")
    stride_tokens: int | None = Field(description="of the compressor; null without one")
    window_tokens: int | None = Field(description="tokens that an entry reads; null without a compressor")
    axis_tokens: int = Field(description="length of the phase axis: the stride, or what was asked for")
    span_tokens: int = Field(description="length of the queried record")
    boundary_phases: list[int] = Field(description="phases at which the record straddles a chunk edge")
    baseline: Curve = Field(description="the model as it is")
    knockouts: list[Knockout] = Field(description="every unit that was taken out")
    gates: list[GateProfile] = Field(description="mean gate weights; empty without a compressor")
    training: list[TrainingStep] = Field(description="gates through training, where checkpoints were given")
    cycling: list[Cycling] = Field(description="rolled parameters; empty without a compressor")
    causes: list[Cause] = Field(description="the four causes")
    summary: list[str] = Field(description="the findings in sentences")
    notes: list[str] = Field(description="limits that a reader must know")
