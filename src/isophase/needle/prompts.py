"""Prompts of a needle run, exact to the token in the model's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isophase.errors import IsophaseError
from isophase.needle.settings import NeedleSettings
from isophase.probes import Ids, Tokenizer, has_closed_vocabulary, piece_ids

NEEDLE = " The secret number of London is"
QUESTION = "\nQuestion: What is the secret number of London?\nAnswer: The secret number of London is"
_STREAM = 7
"""Keeps these draws apart from others that are made with the same seed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NeedlePrompt:
    """One prompt.

    Attributes:
        ids: int32 [T], start-of-text included.
        answer_ids: tokens of the code as they stand in the needle.
        position_tokens: index of the needle's first token; its phase is this modulo the number of phases.
    """

    ids: Ids
    answer_ids: tuple[int, ...]
    position_tokens: int


class NeedleTask:
    """Builds any prompt of a run from its number.

    Within a length and depth only the phase moves: the same code stands ever one token later in the same filler.

    Args:
        settings: of the run.
        tokenizer: of the model.
        haystack: text that hides the needle; repeated where it ends.

    Raises:
        IsophaseError: if the tokenizer cannot write the prompts, or the lengths leave no room.
    """

    def __init__(self, settings: NeedleSettings, tokenizer: Tokenizer, haystack: str) -> None:
        if has_closed_vocabulary(tokenizer):
            raise IsophaseError(
                f"the tokenizer of {settings.target} knows only its own words and cannot write the needle.",
                "Needles need a model of text; audit this one instead.",
            )
        self.settings = settings
        self._tokenizer = tokenizer
        self._filler = np.array(piece_ids(tokenizer, " " + " ".join(haystack.split())), dtype=np.int32)
        if len(self._filler) == 0:
            raise IsophaseError("the haystack is empty.", "Give a file with text.")
        self._head = np.array(tokenizer.prefix_ids, dtype=np.int32)
        self._needle = np.array(piece_ids(tokenizer, NEEDLE), dtype=np.int32)
        self._stop = np.array(piece_ids(tokenizer, "."), dtype=np.int32)
        self._question = np.array(piece_ids(tokenizer, QUESTION), dtype=np.int32)
        # The longest code that may come decides, so that all prompts of a length are equally long.
        self.span_tokens = len(self._needle) + len(self._code(99_999)) + len(self._stop)
        fixed = len(self._head) + self.span_tokens + len(self._question)
        shortest = fixed + 3 * settings.phases
        if min(settings.lengths) < shortest:
            raise IsophaseError(
                f"a prompt of {min(settings.lengths)} tokens has no room for needle, question and "
                f"{settings.phases} phases.",
                f"Give lengths of at least {shortest} tokens.",
            )

    def _code(self, number: int) -> tuple[int, ...]:
        return tuple(piece_ids(self._tokenizer, f" {number}"))

    def _item(self, length: int, depth: int) -> tuple[tuple[int, ...], int, int]:
        """Code, first token of the filler, and first position of an item."""
        settings, tokens = self.settings, self.settings.lengths[length]
        rng = np.random.default_rng([settings.seed, _STREAM, length, depth])
        code = self._code(int(rng.integers(10_000, 100_000)))
        while len(code) + len(self._needle) + len(self._stop) != self.span_tokens:
            code = self._code(int(rng.integers(10_000, 100_000)))
        start = int(rng.integers(len(self._filler)))
        phases = settings.phases
        earliest = len(self._head) + phases
        latest = tokens - len(self._question) - self.span_tokens - phases + 1
        share = depth / (settings.depths - 1) if settings.depths > 1 else 0.5
        # A first residue drawn by lot: a trend with depth then falls on no residue in particular.
        around = earliest + int(share * (latest - earliest))
        first = around // phases * phases + int(rng.integers(phases))
        return code, start, min(max(first, earliest - phases), latest)

    def prompt(self, row: int) -> NeedlePrompt:
        """The prompt of a row."""
        length, depth, column = self.settings.place(row)
        code, start, first = self._item(length, depth)
        at = first + column
        tokens = self.settings.lengths[length]
        room = tokens - len(self._head) - self.span_tokens - len(self._question)
        filler = np.take(self._filler, start + np.arange(room), mode="wrap")
        before = at - len(self._head)
        ids = np.concatenate(
            [
                self._head,
                filler[:before],
                self._needle,
                np.array(code, dtype=np.int32),
                self._stop,
                filler[before:],
                self._question,
            ]
        )
        assert len(ids) == tokens
        return NeedlePrompt(ids=ids, answer_ids=code, position_tokens=at)
