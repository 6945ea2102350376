"""A training run's folder: `recipe.json` first, `curve.jsonl` appended to, one checkpoint, `training.json` last.

A checkpoint holds everything that decides what follows, so a run that is killed at any instant and
resumed ends with the files of an undisturbed one, to the last byte.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from isophase.atomic import write_atomically
from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe

CHECKPOINT, CURVE, RECIPE, RECORD = "checkpoint.pt", "curve.jsonl", "recipe.json", "training.json"


@dataclass(kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimiser steps done.
        sequences: sequences read.
        tokens: tokens read.
        seconds: time spent training, over all sessions.
        recent: loss and accuracy of the steps since the last point of the curve.
        curve: the points so far.
    """

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recent: list[tuple[float, float]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)


class TrainingFolder:
    """The folder of one run, locked against a second trainer.

    Args:
        folder: created if missing.
        recipe: of the run.
        resume: go on with an unfinished run, or begin one where there is none.

    Raises:
        IsophaseError: for a folder that cannot be written, is in use, holds a finished run, another
            recipe's run, or an unfinished one that is not to be resumed.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, resume: bool) -> None:
        self.folder = folder
        if (folder / RECORD).exists():
            raise IsophaseError(
                f"{str(folder)!r} already holds a trained model.", "Choose another --out, or remove it."
            )
        begun = (folder / RECIPE).exists() or (folder / CHECKPOINT).exists()
        if begun and not resume:
            raise IsophaseError(
                f"{str(folder)!r} holds an unfinished run.", "Add --resume to go on with it, or choose another --out."
            )
        if begun:
            refuse_another_recipe(folder, recipe)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._curve: IO[bytes] = (folder / CURVE).open("ab", buffering=0)
        except OSError as error:
            raise write_error(folder, error) from error
        try:
            fcntl.flock(self._curve, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._curve.close()
            raise IsophaseError(f"{str(folder)!r} is in use by another process.", "Wait for it to end.") from error
        self._guard(lambda: write_atomically(folder / RECIPE, recipe.model_dump_json(indent=2) + "\n"))

    def begin(self, curve: list[dict[str, Any]]) -> None:
        """Bring `curve.jsonl` to the points of the checkpoint: later ones will come again."""
        os.truncate(self._curve.fileno(), 0)
        for point in curve:
            self.append(point)

    def append(self, point: dict[str, Any]) -> None:
        """Append a point to `curve.jsonl`."""

        def write() -> None:
            self._curve.write(json.dumps(point).encode() + b"\n")

        self._guard(write)

    def write_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint: whole or not at all."""

        def write() -> None:
            path = self.folder / CHECKPOINT
            temporary = path.with_name(f".{path.name}.tmp")
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(self.folder)

        self._guard(write)

    def write_model(self, save: Callable[[Path], None]) -> None:
        """Write the model's files, each whole or not at all.

        Args:
            save: writes them into a folder that it is given.
        """

        def write() -> None:
            parts = self.folder / ".model.tmp"
            parts.mkdir(exist_ok=True)
            for left in parts.iterdir():
                left.unlink()
            save(parts)
            for file in sorted(parts.iterdir()):
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                file.replace(self.folder / file.name)
            parts.rmdir()
            _sync_folder(self.folder)

        self._guard(write)

    def keep_step(self, step: int, save: Callable[[Path], None]) -> None:
        """Keep the model as it is after a step, in a folder `step-N` of its own: whole or not at all.

        Args:
            step: steps done.
            save: writes the model's files into a folder that it is given.
        """

        def write() -> None:
            parts, kept = self.folder / ".step.tmp", self.folder / f"step-{step}"
            for left in (parts, kept):  # of a killed process; or kept once already, before it was killed
                if left.exists():
                    shutil.rmtree(left)
            parts.mkdir()
            save(parts)
            parts.rename(kept)
            _sync_folder(self.folder)

        self._guard(write)

    def finish(self, record: str) -> None:
        """Write `training.json`, which says that the run is complete, and remove the checkpoint."""
        self._guard(lambda: os.fsync(self._curve.fileno()))
        self._guard(lambda: write_atomically(self.folder / RECORD, record))
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder free."""
        self._curve.close()

    def _guard(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise write_error(self.folder, error) from error


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The checkpoint of a run, on the CPU, or None.

    Raises:
        IsophaseError: if it cannot be read.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise IsophaseError(
            f"{path} is damaged ({type(error).__name__}).", "Remove it: the run then begins again with --resume."
        ) from error
    return state


def refuse_another_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse to go on with a run of another recipe.

    Raises:
        IsophaseError: naming the first setting that differs.
    """
    path = folder / RECIPE
    if not path.exists():
        return
    try:
        there = Recipe.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IsophaseError(f"{path} is damaged.", "Choose another --out.") from error
    for name, value in recipe.model_dump().items():
        if (old := there.model_dump()[name]) != value:
            raise IsophaseError(
                f"{str(folder)!r} holds a run of another recipe ({name} is {old!r} there and {value!r} here).",
                "Choose another --out, or repeat the command that began it.",
            )


def write_error(folder: Path, error: OSError) -> IsophaseError:
    """What a failed write into a training folder means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return IsophaseError(f"the disk of {str(folder)!r} is full.", "Free some space and repeat with --resume.")
    return IsophaseError(f"cannot write to {str(folder)!r}: {error.strerror}.", "Choose another --out.")


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
