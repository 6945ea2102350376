"""A training recipe: everything that decides a run, in one YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isophase.errors import IsophaseError
from isophase.lab.tasks import LookupStage


class Optimiser(BaseModel):
    """AdamW with a linear warm-up, a flat stretch and a linear decay.

    Attributes:
        learning_rate: of the flat stretch.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup_steps: steps from 0 to the full rate.
        decay_from: share of all steps after which the rate falls, 0..1.
        final_share: share of the rate that is left at the last step.
        clip_norm: largest norm of the gradient.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=50, ge=0)
    decay_from: float = Field(default=0.6, ge=0, le=1)
    final_share: float = Field(default=0.02, ge=0, le=1)
    clip_norm: float = Field(default=1.0, gt=0)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step.

        Args:
            step: 0..steps-1.
            steps: of the whole run.
        """
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        flat_until = self.decay_from * steps
        if step < flat_until:
            return self.learning_rate * warm
        left = (steps - step) / max(steps - flat_until, 1.0)
        return self.learning_rate * warm * max(self.final_share, left)


class Recipe(BaseModel):
    """A run of `isophase train`.

    Attributes:
        name: of the model; also the default folder.
        purpose: one sentence for `isophase models`.
        seed: decides initialisation and data. Parameters that two models share by name start equal.
        threads: of torch on the CPU; part of the recipe because it can change the last digit.
        model: settings of `CompressedQwen3Config`.
        stages: curriculum, in order.
        optimiser: see `Optimiser`.
        probe: probe settings that suit the trained model (records, length_tokens, items).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    purpose: str = ""
    seed: int = Field(ge=0)
    threads: int = Field(default=1, ge=1)
    model: dict[str, Any]
    stages: tuple[LookupStage, ...] = Field(min_length=1)
    optimiser: Optimiser
    probe: dict[str, int | str] = Field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return sum(stage.steps for stage in self.stages)


def read_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file. A key `base` names another recipe, relative to this one, whose settings it
            changes: matched recipes then differ visibly in nothing else.
        overrides: `key=value`, the key dotted (`model.compression_stride=4`), the value YAML.

    Raises:
        IsophaseError: for a missing file, bad YAML or an unknown or impossible setting.
    """
    raw = _read_yaml(path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise IsophaseError(f"--set {override!r} is not key=value.", "For example --set seed=2.")
        node = raw
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise IsophaseError(f"--set {key}: {parent!r} holds a single value.", "Check the recipe's keys.")
        try:
            node[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise IsophaseError(f"--set {override!r}: the value is not YAML.", "For example --set seed=2.") from error
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IsophaseError(
            f"{path}: {where}: {first['msg']} (given: {first['input']!r}).", "See docs/training.md."
        ) from error


def _read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in above:
        raise IsophaseError(f"recipe {str(path)!r} is its own base.", "Let `base` name another recipe.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IsophaseError(f"cannot read recipe {str(path)!r}: {error.strerror}.", "Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise IsophaseError(f"{path} is not YAML: {str(error).splitlines()[0]}.", "Check the file.") from error
    if not isinstance(raw, dict):
        raise IsophaseError(f"{path} holds no settings.", "See recipes/ for examples.")
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise IsophaseError(f"{path}: base: {base!r} is no file name.", "Name a recipe, relative to this one.")
    merged = _read_yaml(path.parent / base, (*above, path.resolve()))
    for key, value in raw.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
