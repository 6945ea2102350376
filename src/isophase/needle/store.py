"""A needle run on disk: `settings.json`, then one line per prompt in `answers.jsonl`; a killed run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from isophase.atomic import write_atomically
from isophase.audit import ANSWERS, AnswersFile, write_error
from isophase.errors import IsophaseError
from isophase.needle.settings import NeedleSettings

SETTINGS = "settings.json"


class NeedleAnswer(BaseModel):
    """What all methods made of one prompt; lists run over the methods.

    Attributes:
        row: number of the prompt.
        position_tokens: index of the needle's first token.
        correct: whether the whole code was the most likely continuation.
        log_probability: natural log of the code's probability.
        entries: entries kept in a KV head of the first compressed layer, in the one with most.
        stored_bytes: keys and values of all compressed layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: int
    position_tokens: int
    correct: tuple[bool, ...]
    log_probability: tuple[float, ...]
    entries: tuple[int, ...]
    stored_bytes: tuple[int, ...]


class NeedleFolder(AnswersFile):
    """A run folder open for appending; one process at a time.

    Args:
        folder: created if missing; must be empty or hold a run of the same settings.
        settings: of the run.

    Raises:
        IsophaseError: if the folder cannot be written, holds something else, or is in use.
    """

    def __init__(self, folder: Path, settings: NeedleSettings) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / SETTINGS).exists():
                self._compare(settings)
            elif strange := sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")):
                raise IsophaseError(
                    f"{str(folder)!r} is not empty and not a needle run (it holds {strange[0]!r}).",
                    "Choose another --out.",
                )
            else:
                write_atomically(folder / SETTINGS, settings.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise write_error(folder, error) from error
        self._open()
        self.answers, whole = read_answers(folder)
        self._cut(whole)

    def _compare(self, settings: NeedleSettings) -> None:
        then, now = read_settings(self.folder).model_dump(), settings.model_dump()
        if different := next((name for name in now if then[name] != now[name]), None):
            raise IsophaseError(
                f"{str(self.folder)!r} holds a run with other settings ({different} is {then[different]!r} there and "
                f"{now[different]!r} here).",
                "Choose another --out, or repeat the command that began it to resume.",
            )

    def append(self, answer: NeedleAnswer) -> None:
        """Append one answer, durable before the call returns.

        Raises:
            IsophaseError: if the disk is full; what was there before is kept.
        """
        self._append(answer.model_dump_json().encode() + b"\n")
        self.answers[answer.row] = answer


def read_settings(folder: Path) -> NeedleSettings:
    """Settings of a run.

    Raises:
        IsophaseError: if the folder is no needle run, or damaged.
    """
    try:
        raw: Any = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        return NeedleSettings.model_validate(raw)
    except (OSError, ValueError, ValidationError) as error:
        raise IsophaseError(
            f"{str(folder / SETTINGS)!r} cannot be read ({type(error).__name__}).", "Choose another --out."
        ) from error


def read_answers(folder: Path) -> tuple[dict[int, NeedleAnswer], int]:
    """Answers by row, and the number of bytes that are whole lines.

    Raises:
        IsophaseError: if a line other than the last is damaged.
    """
    path = folder / ANSWERS
    answers: dict[int, NeedleAnswer] = {}
    whole = 0
    raw = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(raw.splitlines(keepends=True), start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no line end")
            answer = NeedleAnswer.model_validate_json(line)
        except ValueError as error:
            if whole + len(line) == len(raw):
                break
            raise IsophaseError(
                f"{path} line {number} is damaged, and it is not the last.", "Run into another --out folder."
            ) from error
        answers[answer.row] = answer
        whole += len(line)
    return answers, whole
