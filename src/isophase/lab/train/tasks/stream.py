"""The batches of a whole run, in order, from a generator whose state can be kept and restored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from isophase.errors import IsophaseError
from isophase.lab.train.tasks.lookup import Batch, LookupStage, lookup_batch
from isophase.lab.train.tasks.text import Corpus, TextStage
from isophase.probes import WORDS


def _kind(raw: Any) -> str:
    kind = raw.get("kind", "lookup") if isinstance(raw, dict) else getattr(raw, "kind", "lookup")
    return str(kind)


Part = Annotated[
    Annotated[LookupStage, Tag("lookup")] | Annotated[TextStage, Tag("text")],
    Discriminator(_kind),
]


class MixtureStage(BaseModel):
    """Several tasks in one stage: the steps of all parts, in an order that the seed decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["mixture"]
    parts: tuple[Part, ...] = Field(min_length=2, description="each with its own batch and number of steps")

    @property
    def steps(self) -> int:
        """Optimiser steps of all parts."""
        return sum(part.steps for part in self.parts)


Stage = Annotated[
    Annotated[LookupStage, Tag("lookup")] | Annotated[TextStage, Tag("text")] | Annotated[MixtureStage, Tag("mixture")],
    Discriminator(_kind),
]


def parts_of(stages: Sequence[LookupStage | TextStage | MixtureStage]) -> list[LookupStage | TextStage]:
    """The tasks of a curriculum, mixtures taken apart."""
    return [part for stage in stages for part in (stage.parts if isinstance(stage, MixtureStage) else (stage,))]


class DataStream:
    """Draws the batches of a run.

    Args:
        stages: the curriculum.
        seed: decides every batch and their order.
        tokenizer: a transformers tokenizer; None: the closed vocabulary, which lookup is written in.
        folder: where token ids of text files are kept.

    Raises:
        IsophaseError: for text without a tokenizer, unreadable text, or a tokenizer that cannot write
            the words of lookup.
    """

    def __init__(
        self,
        stages: Sequence[LookupStage | TextStage | MixtureStage],
        seed: int,
        tokenizer: Any | None,
        folder: Path,
    ) -> None:
        self._stages, self._seed = stages, seed
        self._rng = np.random.default_rng(seed)
        self._words: npt.NDArray[np.int64] | None = None
        self._corpora: dict[object, Corpus] = {}
        self._validation_batch = 1
        self._drawn: dict[str, int] = {}
        for part in parts_of(stages):
            if isinstance(part, TextStage):
                if tokenizer is None:
                    raise IsophaseError("a text stage needs a tokenizer.", "Add `tokenizer: FOLDER` to the recipe.")
                if part.source not in self._corpora:
                    self._corpora[part.source] = Corpus(part, tokenizer, folder)
                self._validation_batch = max(self._validation_batch, part.batch)
            elif tokenizer is not None and self._words is None:
                self._words = _word_ids(tokenizer)
        if len({corpus.fingerprint for corpus in self._corpora.values()}) < len(self._corpora):
            raise IsophaseError(
                "two stages read the same text with another sequence_tokens or validation_sequences: "
                "one would train on what the other holds out.",
                "Give them the same two settings.",
            )

    def schedule(self, first: int = 0) -> Iterator[tuple[int, LookupStage | TextStage]]:
        """Stage number and task of every step from `first` on."""
        step = 0
        for number, stage in enumerate(self._stages):
            for part in self._order(number, stage)[max(0, first - step) :]:
                yield number, part
            step += stage.steps

    def draw(self, part: LookupStage | TextStage) -> Batch:
        """The next batch of a task."""
        if isinstance(part, TextStage):
            corpus = self._corpora[part.source]
            drawn = self._drawn.get(corpus.fingerprint, 0)
            self._drawn[corpus.fingerprint] = drawn + part.batch
            return corpus.batch(drawn, part.batch, self._seed)
        batch = lookup_batch(part, self._rng)
        if self._words is None:
            return batch
        labels = np.where(batch.labels < 0, batch.labels, self._words[batch.labels])
        return Batch(ids=self._words[batch.ids], labels=labels)

    def validation(self) -> Iterator[Batch]:
        """All sequences that are held out, in batches; nothing where no stage holds any out."""
        for corpus in self._corpora.values():
            yield from corpus.validation(self._validation_batch)

    def state(self) -> str:
        """Where the stream stands, as JSON."""
        corpora = [corpus.fingerprint for corpus in self._corpora.values()]
        return json.dumps({"rng": self._rng.bit_generator.state, "drawn": self._drawn, "corpora": corpora})

    def restore(self, state: str) -> None:
        """Go on from where `state` was taken.

        Raises:
            IsophaseError: if the text files or the tokenizer have changed.
        """
        kept = json.loads(state)
        if kept["corpora"] != [corpus.fingerprint for corpus in self._corpora.values()]:
            raise IsophaseError(
                "the text files or the tokenizer have changed since the run began.",
                "Restore them, or begin again in another --out folder.",
            )
        self._rng.bit_generator.state = kept["rng"]
        self._drawn = kept["drawn"]

    def _order(self, number: int, stage: LookupStage | TextStage | MixtureStage) -> Sequence[LookupStage | TextStage]:
        if not isinstance(stage, MixtureStage):
            return [stage] * stage.steps
        which = np.repeat(np.arange(len(stage.parts)), [part.steps for part in stage.parts])
        return [stage.parts[n] for n in np.random.default_rng((self._seed, number)).permutation(which)]


def _word_ids(tokenizer: Any) -> npt.NDArray[np.int64]:
    """The tokenizer's id of every word of the closed vocabulary; pad and end are never drawn."""
    ids = np.zeros(len(WORDS), dtype=np.int64)
    for number, word in enumerate(WORDS[2:], start=2):
        for text in (f" {word}", word):
            one: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(one) == 1 and one[0] != tokenizer.unk_token_id:
                ids[number] = one[0]
                break
        else:
            raise IsophaseError(
                f"the tokenizer writes {word!r} with {len(one)} tokens or not at all, and lookup needs one.",
                "Use a tokenizer with more words, or leave the lookup stages out.",
            )
    return ids
