"""What a target is, and what it answers."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from pydantic import BaseModel, ConfigDict

from isophase.probes import Prompt, Tokenizer
from isophase.targets.strides import Grid

REPEAT_EVERY = 20
"""Remote targets ask one prompt in so many, chosen by its ids, a second time: the share of other answers is the
flip rate."""

AnswerStatus = Literal["ok", "wrong_format", "truncated", "error"]
ServerKind = Literal["vllm", "sglang", "llamacpp", "openai", "chat"]
SERVER_CHOICES: tuple[str, ...] = ("auto", *get_args(ServerKind))


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
        repeat_agrees: whether the same question, asked a second time, was answered alike; None: not asked again.
    """

    status: AnswerStatus
    correct: bool
    log_probability: float
    output_ids: tuple[int, ...] = ()
    choice_log_probabilities: tuple[float, ...] = ()
    detail: str = ""
    repeat_agrees: bool | None = None


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


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to treat a server; other targets have no use for it.

    Attributes:
        kind: `vllm`, `sglang`, `llamacpp`, `openai`, `chat`, or `auto`.
        tokenizer: file, folder or hub id; None: from the model's path, or the server's own route.
        concurrency: most requests in flight.
        timeout_seconds: longest time of one request.
    """

    kind: str = "auto"
    tokenizer: str | None = None
    concurrency: int = 16
    timeout_seconds: float = 600.0


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


@runtime_checkable
class StreamingTarget(Protocol):
    """A target that works on several prompts at a time and gives answers as they come."""

    def stream(self, prompts: Iterable[Prompt]) -> Generator[tuple[int, Answer], None, None]:
        """Answer prompts.

        Args:
            prompts: any number, read only as fast as they are asked.

        Yields:
            The number of a prompt, from 0, and its answer; every prompt once, in any order.
        """


@runtime_checkable
class SharingTarget(Protocol):
    """A target that answers from what another has read, if that was the last to be asked the same prompts."""

    @property
    def reading(self) -> str:
        """Equal for targets that can share."""


@runtime_checkable
class RemoteTarget(Protocol):
    """A target whose surroundings matter: a tokenizer from elsewhere, periods of the server."""

    @property
    def tokenizer_source(self) -> str:
        """Where a report finds the tokenizer without the target; empty: nowhere."""

    @property
    def control_periods(self) -> tuple[int, ...]:
        """Periods in tokens that belong to the server, not to the model."""

    @property
    def readings(self) -> int:
        """How often each prompt is read, repeats for the flip rate apart."""
