"""How records, filler and questions are written, and their token ids for one tokenizer.

Pieces of text are encoded separately and their ids are joined, so a record costs the same number of
tokens wherever it stands. The ids are the truth: a tokenizer may cut the joined text otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isophase.errors import IsophaseError
from isophase.probes.lexicon import FILLER, KEYS, VALUES
from isophase.probes.prompt import Tokenizer
from isophase.probes.vocabulary import (
    Ids,
    has_closed_vocabulary,
    piece_ids,
    prose_ids,
    single_token_words,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Template:
    """Token ids with slots for keys and values.

    Attributes:
        ids: int32 [tokens], 0 in the slots.
        key_at: first index of each slot for a key.
        value_at: first index of each slot for a value.
    """

    ids: Ids
    key_at: tuple[int, ...]
    value_at: tuple[int, ...]

    def fill(self, keys: Ids, values: Ids) -> Ids:
        """Fill the slots of n copies.

        Args:
            keys: int32 [n, key_tokens].
            values: int32 [n, value_tokens].

        Returns:
            int32 [n, tokens].
        """
        rows = np.tile(self.ids, (len(keys), 1))
        for at in self.key_at:
            rows[:, at : at + keys.shape[1]] = keys
        for at in self.value_at:
            rows[:, at : at + values.shape[1]] = values
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedStyle:
    """A style in the ids of one tokenizer.

    Attributes:
        name: of the style.
        prologue: int32, start-of-text and instruction.
        record: one record.
        opening: int32, what precedes the demonstrations.
        shot: a question with its answer.
        question: the final question, up to where the answer starts.
        key_words: int32, words that keys are made of.
        value_words: int32, words that values are made of.
        key_tokens: words per key.
        value_tokens: words per value.
        filler_words: int32, the words of random filler, or a text that filler is cut from.
        prose: whether `filler_words` is a text.
    """

    name: str
    prologue: Ids
    record: Template
    opening: Ids
    shot: Template
    question: Template
    key_words: Ids
    value_words: Ids
    key_tokens: int
    value_tokens: int
    filler_words: Ids
    prose: bool

    def filler(self, rng: np.random.Generator, tokens: int) -> Ids:
        """Draw a stream of filler.

        Args:
            rng: source of randomness.
            tokens: length, >= 0.

        Returns:
            int32 [tokens]. Prose starts at a random token and repeats when it ends.
        """
        words = len(self.filler_words)
        if self.prose:
            return np.take(self.filler_words, rng.integers(words) + np.arange(tokens), mode="wrap")
        return np.take(self.filler_words, rng.integers(words, size=tokens))

    def draw_numbers(self, rng: np.random.Generator, records: int) -> tuple[npt.NDArray[np.int64], ...]:
        """Draw distinct keys, and values that are distinct where there are enough of them.

        Args:
            rng: source of randomness.
            records: number of records (n).

        Returns:
            Numbers of keys and of values, int64 [n] each, for `word_combinations`.

        Raises:
            IsophaseError: there are fewer keys than records.
        """
        key_pool = len(self.key_words) ** self.key_tokens
        value_pool = len(self.value_words) ** self.value_tokens
        if records > key_pool:
            raise IsophaseError(
                f"{records} records need as many distinct keys, and this tokenizer offers {key_pool}: "
                f"{len(self.key_words)} words are single tokens, at {self.key_tokens} per key.",
                f"Use --records {key_pool} or fewer, or --key-tokens {self.key_tokens + 1}.",
            )
        keys = rng.choice(key_pool, size=records, replace=False)
        if records <= value_pool:
            values = rng.choice(value_pool, size=records, replace=False)
        else:  # every value equally often, so that no guess is better than another
            values = rng.permutation(np.resize(rng.permutation(value_pool), records))
        return keys, values


@dataclass(frozen=True, kw_only=True)
class RecordStyle:
    """How to write a prompt, as texts in which `{key}` and `{value}` stand for words.

    Words carry their own leading space, so no space stands before a slot.

    Attributes:
        name: by which users choose it.
        record: text of a record.
        question: text of a question, up to its answer.
        shot_end: what follows the answer of a demonstration.
        preamble: instruction at the start.
        opening: what stands between the records and the questions.
        prose: filler is cut from prose; otherwise it is random filler words.
    """

    name: str
    record: str
    question: str
    shot_end: str = ""
    preamble: str = ""
    opening: str = ""
    prose: bool = True

    def resolve(self, tokenizer: Tokenizer, key_tokens: int = 1, value_tokens: int = 1) -> ResolvedStyle:
        """Find words that are single tokens, and the ids of everything else.

        Args:
            tokenizer: of the target.
            key_tokens: words per key, >= 1.
            value_tokens: words per value, >= 1.

        Returns:
            The style in this tokenizer's ids.

        Raises:
            IsophaseError: the tokenizer lacks words or cannot spell the style's texts.
        """
        keys = single_token_words(tokenizer, KEYS)
        values = single_token_words(tokenizer, VALUES)
        filler = prose_ids(tokenizer) if self.prose else single_token_words(tokenizer, FILLER)
        for what, found, needed in (("keys", keys, 2), ("values", values, 2), ("filler", filler, 1)):
            if len(found) < needed:
                raise IsophaseError(
                    f"Style {self.name!r} needs at least {needed} words for {what} that are single tokens, "
                    f"and this tokenizer has {len(found)}.",
                    "Choose another --style.",
                )

        def template(text: str) -> Template:
            return _template(self.name, tokenizer, text, key_tokens, value_tokens)

        return ResolvedStyle(
            name=self.name,
            prologue=np.concatenate([np.array(tokenizer.prefix_ids, dtype=np.int32), template(self.preamble).ids]),
            record=template(self.record),
            opening=template(self.opening).ids,
            shot=template(self.question + "{value}" + self.shot_end),
            question=template(self.question),
            key_words=keys,
            value_words=values,
            key_tokens=key_tokens,
            value_tokens=value_tokens,
            filler_words=filler,
            prose=self.prose,
        )


def _template(style: str, tokenizer: Tokenizer, text: str, key_tokens: int, value_tokens: int) -> Template:
    """Encode a text piece by piece, leaving slots for keys and values."""
    ids: list[int] = []
    key_at: list[int] = []
    value_at: list[int] = []
    for piece in re.split(r"(\{key\}|\{value\})", text):
        if piece == "{key}":
            key_at.append(len(ids))
            ids += [0] * key_tokens
        elif piece == "{value}":
            value_at.append(len(ids))
            ids += [0] * value_tokens
        elif piece:
            piece_tokens = piece_ids(tokenizer, piece)
            if tokenizer.decode(piece_tokens).strip() != piece.strip() or not piece_tokens:
                raise IsophaseError(
                    f"Style {style!r} does not apply: this tokenizer cannot spell {_shorten(piece)!r}.",
                    "Choose another --style.",
                )
            ids += piece_tokens
    return Template(ids=np.array(ids, dtype=np.int32), key_at=tuple(key_at), value_at=tuple(value_at))


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


STYLES: dict[str, RecordStyle] = {
    style.name: style
    for style in (
        RecordStyle(name="pairs", record="{key}{value}", question=" ?{key}", prose=False),
        RecordStyle(
            name="sentences",
            preamble=(
                "The text below contains codes that are hidden among other sentences. "
                "Remember them; a question about one of them follows at the end.\n"
            ),
            record=" The code for{key} is{value}.",
            # In the record's own words: small models then err about the record, not about the question.
            opening="\nThe codes again:",
            question=" The code for{key} is",
            shot_end=".",
        ),
        RecordStyle(
            name="compact",
            preamble=(
                "The text below contains records. A record is a key, right after it its value, "
                "and the end of the line.\n"
            ),
            record="{key}{value}\n",
            opening="\nSome of these records again:\n",
            question="{key}",
            shot_end="\n",
        ),
    )
}
"""`pairs`: bundled models. `sentences`: any pretrained model. `compact`: many records, 4 tokens each with
`key_tokens=2` (16,000 in 128K tokens)."""


def pick_style(name: str, tokenizer: Tokenizer) -> RecordStyle:
    """Find a style by name.

    Args:
        name: a key of `STYLES`, or `auto`: `pairs` for closed vocabularies (bundled models), else
            `sentences`.
        tokenizer: of the target.

    Returns:
        The style.

    Raises:
        IsophaseError: there is no such style.
    """
    if name == "auto":
        return STYLES["pairs" if has_closed_vocabulary(tokenizer) else "sentences"]
    if name not in STYLES:
        raise IsophaseError(f"Unknown style {name!r}.", f"Choose one of: auto, {', '.join(STYLES)}.")
    return STYLES[name]
