"""A run folder: `plan.json` first, `answers.jsonl` appended to, `manifest.json` last.

A row is an answer to one prompt, in the order asked; servers are asked several at a time, and their rows stand
in the order of their coming. Nothing in a row depends on when or how often the run was interrupted, so a resumed
run of a model in this process ends with the file of an undisturbed one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from pydantic import ValidationError

from isophase.atomic import write_atomically
from isophase.audit.settings import PLAN_SCHEMA_VERSION, Plan
from isophase.errors import IsophaseError
from isophase.targets import Answer, AnswerStatus

PLAN, ANSWERS, MANIFEST = "plan.json", "answers.jsonl", "manifest.json"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise IsophaseError(
            f"{path} is damaged ({error}).", "Restore it, or run the audit into another --out folder."
        ) from error
    except OSError as error:
        raise IsophaseError(f"cannot read {path}: {error.strerror}.", "Check the path and its permissions.") from error
    if not isinstance(value, dict):
        raise IsophaseError(f"{path} is not a JSON object.", "Run the audit into another --out folder.")
    return value


def read_plan(folder: Path) -> Plan:
    """Read the plan of a run folder.

    Raises:
        IsophaseError: if the folder is no run folder, damaged, or of a newer schema.
    """
    if not (folder / PLAN).is_file():
        raise IsophaseError(
            f"{str(folder)!r} is not a run folder: it has no {PLAN}.",
            "Give the folder that `isophase audit` printed.",
        )
    raw = _read_json(folder / PLAN)
    version = raw.get("schema_version")
    if not isinstance(version, int) or version > PLAN_SCHEMA_VERSION:
        raise IsophaseError(
            f"{folder / PLAN} has schema version {version!r}; this isophase reads up to {PLAN_SCHEMA_VERSION}.",
            "Upgrade isophase.",
        )
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IsophaseError(
            f"{folder / PLAN} is damaged: {where}: {first['msg']}.",
            "Run the audit into another --out folder.",
        ) from error


def encode_answer(row: int, answer: Answer) -> bytes:
    """One line of `answers.jsonl`."""
    record: dict[str, Any] = {"row": row, "status": answer.status, "correct": answer.correct}
    record["log_probability"] = None if math.isnan(answer.log_probability) else answer.log_probability
    record["output_ids"] = list(answer.output_ids)
    if answer.choice_log_probabilities:
        record["choices"] = list(answer.choice_log_probabilities)
    if answer.detail:
        record["detail"] = answer.detail
    if answer.repeat_agrees is not None:
        record["repeat_agrees"] = answer.repeat_agrees
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def decode_answer(record: dict[str, Any]) -> tuple[int, Answer]:
    """Row and answer of one parsed line."""
    log_probability = record["log_probability"]
    if record["status"] not in get_args(AnswerStatus):
        raise ValueError(f"unknown status {record['status']!r}")
    return int(record["row"]), Answer(
        status=record["status"],
        correct=bool(record["correct"]),
        log_probability=float("nan") if log_probability is None else float(log_probability),
        output_ids=tuple(record["output_ids"]),
        choice_log_probabilities=tuple(record.get("choices", ())),
        detail=record.get("detail", ""),
        repeat_agrees=record.get("repeat_agrees"),
    )


def read_answers(folder: Path) -> tuple[dict[int, Answer], int]:
    """All answers of a run folder.

    Returns:
        Answers by row, and the number of bytes that are whole lines: what follows is a torn line
        that a killed run left behind.

    Raises:
        IsophaseError: if a line other than the last is damaged.
    """
    path = folder / ANSWERS
    if not path.exists():
        return {}, 0
    answers: dict[int, Answer] = {}
    whole = 0
    raw = path.read_bytes()
    for number, line in enumerate(raw.splitlines(keepends=True), start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no line end")
            row, answer = decode_answer(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if whole + len(line) == len(raw):
                break
            raise IsophaseError(
                f"{path} line {number} is damaged ({error}), and it is not the last.",
                "Restore the file, or run the audit into another --out folder.",
            ) from error
        answers[row] = answer
        whole += len(line)
    return answers, whole


def refuse_strangers(folder: Path) -> None:
    """Refuse a folder that holds anything but a run.

    Raises:
        IsophaseError: naming one of the files.
        OSError: as from the file system.
    """
    if (folder / PLAN).exists() or not folder.exists():
        return
    strangers = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    if strangers:
        raise IsophaseError(
            f"{str(folder)!r} is not empty and not a run folder (it holds {strangers[0]!r}).",
            "Choose another --out.",
        )


def another_plan(folder: Path, difference: str) -> IsophaseError:
    """The folder holds a run that this command did not begin; `difference` says by what one can tell."""
    return IsophaseError(
        f"{str(folder)!r} holds a run with another plan{difference}.",
        "Choose another --out, or repeat the command that began it to resume.",
    )


class AnswersFile:
    """The `answers.jsonl` of a run folder, open for appending; one process at a time.

    Attributes:
        folder: of the run.
    """

    folder: Path

    def _open(self) -> None:
        """Open the file and lock it.

        Raises:
            IsophaseError: if it cannot be written, or is in use.
        """
        try:
            # Unbuffered: after a failed write nothing may wait in a buffer to be written later.
            self._file = (self.folder / ANSWERS).open("ab", buffering=0)
        except OSError as error:
            raise write_error(self.folder, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise IsophaseError(f"{str(self.folder)!r} is in use by another process.", "Wait for it to end.") from error

    def _cut(self, whole_bytes: int) -> None:
        """Cut off the torn line that a killed run may leave, before anything is appended to it."""
        os.truncate(self._file.fileno(), whole_bytes)

    def _append(self, lines: bytes) -> None:
        """Append whole lines, durable before the call returns.

        Raises:
            IsophaseError: if the disk is full; what was there before is kept.
        """
        size = os.fstat(self._file.fileno()).st_size
        try:
            data = memoryview(lines)
            while data:
                data = data[self._file.write(data) :]
            os.fdatasync(self._file.fileno())
        except OSError as error:
            os.truncate(self._file.fileno(), size)
            raise write_error(self.folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class RunFolder(AnswersFile):
    """A run folder open for appending; one process at a time.

    Args:
        folder: created if missing; must be empty or hold a run of the same plan.
        plan: what is to be asked.

    Raises:
        IsophaseError: if the folder cannot be written, belongs to something else, holds another
            plan, or is in use.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / PLAN).exists():
                refuse_strangers(folder)
                write_atomically(folder / PLAN, plan.model_dump_json(indent=2) + "\n")
            elif read_plan(folder) != plan:
                raise another_plan(folder, "")
        except OSError as error:
            raise write_error(folder, error) from error
        self._open()
        self.answers, whole = read_answers(folder)
        self._cut(whole)

    def append(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Append answers in one write, durable before the call returns.

        Raises:
            IsophaseError: if the disk is full; what was there before is kept.
        """
        self._append(b"".join(encode_answer(row, answer) for row, answer in answers))
        self.answers.update(answers)

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Close the run: the manifest says that it is complete."""
        try:
            write_atomically(self.folder / MANIFEST, json.dumps(facts, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise write_error(self.folder, error) from error


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None while the run is not complete."""
    return _read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else None


def write_error(folder: Path, error: OSError) -> IsophaseError:
    """What a failed write into a run folder means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return IsophaseError(
            f"the disk of {str(folder)!r} is full.",
            "Free some space and repeat the command: it resumes after the last answer.",
        )
    return IsophaseError(f"cannot write to {str(folder)!r}: {error.strerror}.", "Choose another --out.")
