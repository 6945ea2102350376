"""Training data: language-model pretraining on local text, packed into sequences of one length.

Documents are joined with an end token between them and cut every `sequence_tokens`; every token but
a sequence's first is predicted. The order depends on the seed alone, so matched models read the same
sequences in the same order.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from isophase.errors import IsophaseError
from isophase.lab.train.tasks.lookup import Batch

# Which sequences are held out must not depend on the seed: runs of several seeds are compared on them.
_HELD_OUT_SEED = 0


class TextStage(BaseModel):
    """A stage that predicts the next token of local text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["text"]
    files: tuple[str, ...] = Field(
        min_length=1, description="paths or patterns; a file is a document, or in .jsonl every line's `text`"
    )
    sequence_tokens: int = Field(ge=2, description="length of every sequence")
    batch: int = Field(gt=0, description="sequences per step")
    steps: int = Field(gt=0, description="optimiser steps")
    validation_sequences: int = Field(default=0, ge=0, description="sequences that are held out and never trained on")

    @property
    def source(self) -> tuple[tuple[str, ...], int, int]:
        """What decides the sequences, as against how many are read when."""
        return self.files, self.sequence_tokens, self.validation_sequences


class Corpus:
    """The packed sequences of a text stage.

    Args:
        stage: files and lengths.
        tokenizer: a transformers tokenizer.
        folder: where token ids are kept; runs that share it tokenise the text once.

    Raises:
        IsophaseError: for missing or unreadable files, or too little text.
    """

    def __init__(self, stage: TextStage, tokenizer: Any, folder: Path) -> None:
        files = _files(stage.files)
        digest = sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        for file in files:
            facts = file.stat()
            digest.update(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode())
        self.fingerprint = digest.hexdigest()[:16]
        path = folder / f"tokens-{self.fingerprint}.bin"
        if not path.exists():
            _tokenise(files, tokenizer, path)
        tokens = np.memmap(path, dtype=np.uint32, mode="r") if path.stat().st_size else np.zeros(0, np.uint32)
        count = len(tokens) // stage.sequence_tokens
        if count <= stage.validation_sequences:
            raise IsophaseError(
                f"the text files hold {len(tokens)} tokens, {count} sequences of {stage.sequence_tokens}; "
                f"{stage.validation_sequences} are held out and nothing is left to train on.",
                "Give more text, shorter sequences or fewer validation_sequences.",
            )
        self._sequences_NT = tokens[: count * stage.sequence_tokens].reshape(count, stage.sequence_tokens)
        mixed = np.random.default_rng(_HELD_OUT_SEED).permutation(count)
        self._held_out, self._trained = np.split(mixed, [stage.validation_sequences])
        self._epoch: tuple[tuple[int, int], npt.NDArray[np.int64]] = ((-1, -1), mixed)

    def batch(self, drawn: int, count: int, seed: int) -> Batch:
        """The next training sequences; every sequence once before any comes again.

        Args:
            drawn: sequences drawn so far.
            count: sequences to draw.
            seed: of the run; decides the order.
        """
        return _batch(self._sequences_NT[[self._trained[self._place(drawn + n, seed)] for n in range(count)]])

    def validation(self, count: int) -> Iterator[Batch]:
        """The sequences that are held out, `count` at a time."""
        for first in range(0, len(self._held_out), count):
            yield _batch(self._sequences_NT[self._held_out[first : first + count]])

    def _place(self, number: int, seed: int) -> int:
        epoch, within = divmod(number, len(self._trained))
        if self._epoch[0] != (seed, epoch):
            self._epoch = (seed, epoch), np.random.default_rng((seed, epoch)).permutation(len(self._trained))
        return int(self._epoch[1][within])


def _batch(ids_BT: npt.NDArray[np.uint32]) -> Batch:
    ids = ids_BT.astype(np.int64)
    return Batch(ids=ids, labels=ids)


def _files(patterns: tuple[str, ...]) -> list[Path]:
    files: list[Path] = []
    for pattern in patterns:
        # Path.glob takes no absolute pattern.
        found = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())  # noqa: PTH207
        if not found:
            raise IsophaseError(f"no text file matches {pattern!r}.", "Paths are relative to the working folder.")
        files += found
    return files


def _documents(file: Path) -> Iterator[str]:
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            return
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield str(json.loads(line)["text"])
    except OSError as error:
        raise IsophaseError(f"cannot read {str(file)!r}: {error.strerror}.", "Check the path.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise IsophaseError(
            f"{str(file)!r} is no text ({type(error).__name__}: {error}).",
            'Text must be UTF-8, and every line of a .jsonl an object with a "text".',
        ) from error


def _tokenise(files: list[Path], tokenizer: Any, path: Path) -> None:
    """Write the ids of all documents, whole or not at all; two runs may do so at once."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            for file in files:
                for text in _documents(file):
                    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                    out.write(np.asarray([*ids, *end], dtype=np.uint32).tobytes())
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
