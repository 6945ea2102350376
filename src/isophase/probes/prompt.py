"""The prompt type that every probe yields, and the view of a tokenizer that probes need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question to a target. Token ids are the truth; they are never decoded and re-encoded.

    Attributes:
        ids: int32 [T], every token that the model reads, start-of-text and template included.
        answer_ids: the tokens that a right answer consists of, at least one.
        item: number of the item (one set of records, one queried record, one question), from 0.
        column: place within the item's window, 0..window_tokens-1.
        position_tokens: index in `ids` of the first token of the queried key: its residue is
            `position_tokens % period`.
        span_tokens: tokens from the first key token to the last value token; the record straddles
            a chunk edge when they do not all fall into one chunk.
        choices: other answers worth scoring by log-probability (`completion`: the wrong number);
            empty for most probes.
        valid_first_ids: first tokens of all well-formed answers; any other output is
            `wrong_format`. Empty: do not judge the format.
        context_tokens: tokens before the question: a memory that does not know the question is made of these. None:
            no question is told apart.
    """

    ids: npt.NDArray[np.int32]
    answer_ids: tuple[int, ...]
    item: int
    column: int
    position_tokens: int
    span_tokens: int
    choices: tuple[tuple[int, ...], ...] = ()
    valid_first_ids: frozenset[int] = frozenset()
    context_tokens: int | None = None

    @property
    def query_position_tokens(self) -> int:
        """Index of the last prompt token, from which the answer is predicted."""
        return len(self.ids) - 1


class Tokenizer(Protocol):
    """What a probe needs of a tokenizer; targets provide it without importing a model."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens that the model expects before any text (start-of-text), maybe none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens kept."""


class Probe(Protocol):
    """A family of prompts in which only the phase of the queried fact moves.

    Prompts are numbered `row = item * window_tokens + column`; `prompt(row)` rebuilds any of them
    from the settings alone, so a run never stores token ids.
    """

    name: str
    items: int
    window_tokens: int

    def __len__(self) -> int:
        """Number of prompts, `items * window_tokens`."""

    def prompt(self, row: int) -> Prompt:
        """Build the prompt of one row (deterministic)."""

    def __iter__(self) -> Iterator[Prompt]:
        """All prompts in row order, built one at a time."""
