"""What a target is, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from isophase.probes.prompt import Prompt, Tokenizer
from isophase.targets.strides import Grid

AnswerStatus = Literal["ok", "wrong_format", "truncated", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a target made of one prompt.

    Attributes:
        status: `ok` (judged by `correct`), `wrong_format` (an answer, but not one of the prompt's
            well-formed ones: a miss, counted apart), `truncated` (cut off before it could be judged) or
            `error` (no answer). The last two are never counted as a miss; they are left out of accuracies.
        correct: whether the output is the prompt's answer; False unless `status` is `ok`.
        log_probability: natural log of the probability of `answer_ids`; nan where unknown.
        output_ids: what was generated, maybe nothing.
        choice_log_probabilities: natural logs, one per entry of the prompt's `choices`, or empty.
        detail: what went wrong, in words; empty if nothing did.
    """

    status: AnswerStatus
    correct: bool
    log_probability: float
    output_ids: tuple[int, ...] = ()
    choice_log_probabilities: tuple[float, ...] = ()
    detail: str = ""


class TargetDefaults(BaseModel):
    """Defaults that a target proposes; None leaves the choice to the audit.

    Attributes:
        style: how prompts are written (see `isophase.probes.styles`).
        records: number of records; None: a pilot picks it.
        length_tokens: length of each prompt.
        items: number of items.
        demonstrations: answered questions before the question.
        control: spec of the model to compare with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    style: str | None = None
    records: int | None = None
    length_tokens: int | None = None
    items: int | None = None
    demonstrations: int = 0
    control: str | None = None


class Target(Protocol):
    """Something that answers prompts: a model in this process, a server, or a planted effect."""

    @property
    def name(self) -> str:
        """By which users chose it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids its prompts are made of."""

    @property
    def grids(self) -> list[Grid]:
        """Fixed grids of its compressor where they are known, the one that matters most first."""

    @property
    def max_length_tokens(self) -> int | None:
        """Longest prompt it can read; None where there is no limit."""

    @property
    def grouped(self) -> bool:
        """Whether it wants the prompts of an item one after another, to reuse what they share."""

    @property
    def defaults(self) -> TargetDefaults:
        """Probe settings that suit it."""

    def fingerprint(self) -> str:
        """A digest that changes when the model does: a run is never resumed on another model."""

    def describe(self) -> Mapping[str, object]:
        """Facts for the manifest, such as versions and sizes, as JSON values."""

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Answer prompts.

        Args:
            prompts: any number.

        Yields:
            One answer per prompt, in their order. A prompt that fails yields an `error`; the
            others go on.
        """
