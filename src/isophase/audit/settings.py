"""What the user asked for, and what a plan made of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from isophase.probes import ProbeSettings

PLAN_SCHEMA_VERSION = 1

Role = Literal["target", "control"]
StrideSource = Literal["configuration", "given", "scan"]


class AuditSettings(BaseModel):
    """An audit as asked for. `None` leaves the choice to the target or to the plan.

    Attributes:
        targets: specs of the models to audit, the first one leads the report.
        control: spec of the model to compare with.
        probes: probe names, the first one leads the report.
        stride: `auto` (configuration, else scan), `scan`, or tokens.
        items: items per probe, at least 2.
        records: records per prompt.
        length_tokens: length of every prompt.
        window_tokens: positions per item; every residue of every period that divides it is covered.
        seed: decides prompts and their order.
        demonstrations: answered questions before the question.
        key_tokens: tokens per key.
        value_tokens: tokens per value.
        style: how prompts are written; `auto` asks the target.
        margin: amplitude below which an effect does not matter.
        shifts: random shifts of the shift test.
        gguf_file: GGUF file inside an `hf:` folder.
        server: kind of the servers among the targets, or `auto`.
        tokenizer: of the servers among the targets; None: as they say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: tuple[str, ...] = Field(min_length=1)
    control: str | None = None
    probes: tuple[str, ...] = ("records",)
    stride: int | Literal["auto", "scan"] = "auto"
    items: int | None = None
    records: int | None = None
    length_tokens: int | None = None
    window_tokens: int | None = None
    seed: int = 0
    demonstrations: int | None = None
    key_tokens: int = 1
    value_tokens: int = 1
    style: str = "auto"
    margin: float = 0.02
    shifts: int = 9_999
    gguf_file: str | None = None
    server: str = "auto"
    tokenizer: str | None = None


class Part(BaseModel):
    """One probe on one model: a contiguous block of rows of the run.

    Attributes:
        role: target or control.
        target: spec of the model.
        probe: complete settings; with the model's tokenizer they rebuild every prompt.
        stride_tokens: stride that the test is told; None: the scan decides.
        stride_source: where the stride comes from.
        grids: sentences about the compression grids that the configuration names.
        first_row: row of the first prompt.
        rows: number of prompts.
        fingerprint: digest of the model, so that a resume on another model is refused.
        pilot_accuracy: accuracy by number of records in the pilot, if there was one.
        tokenizer: where the tokenizer of a server was found; empty: with the model.
        control_periods: periods that belong to the server rather than to the model, tested as controls.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    target: str
    probe: ProbeSettings
    stride_tokens: int | None
    stride_source: StrideSource
    grids: tuple[str, ...] = ()
    first_row: int
    rows: int
    fingerprint: str = ""
    pilot_accuracy: dict[str, float] = Field(default_factory=dict)
    tokenizer: str = ""
    control_periods: tuple[int, ...] = ()


class Plan(BaseModel):
    """`plan.json`: everything that decides a run's prompts, written before the first question.

    Attributes:
        schema_version: of this file.
        isophase_version: version that wrote the file.
        settings: the audit as asked for.
        parts: what is asked: one probe on one model each.
        notes: limits of the run that are known before it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = PLAN_SCHEMA_VERSION
    isophase_version: str
    settings: AuditSettings
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of prompts in the run."""
        return sum(part.rows for part in self.parts)

    def part_of(self, row: int) -> Part:
        """The part that a row belongs to.

        Raises:
            IndexError: if the run has no such row.
        """
        for part in self.parts:
            if part.first_row <= row < part.first_row + part.rows:
                return part
        raise IndexError(row)
