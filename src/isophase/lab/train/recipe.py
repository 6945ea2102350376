"""A training recipe: everything that decides a run, in one YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isophase.errors import IsophaseError
from isophase.lab.train.tasks.stream import Stage


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
        architecture: `compressed_qwen3`, our model, or `deepseek_v4`, transformers' own class.
        model: settings of `CompressedQwen3Config` or `DeepseekV4Config`.
        tokenizer: folder or hub id of the tokenizer; None: the closed vocabulary of the bundled models.
        stages: curriculum, in order.
        optimiser: see `Optimiser`.
        device: `auto` takes a GPU where there is one, or `cpu`.
        precision: `fp32`, `bf16` (parameters stay in float32), or `auto`: bf16 on a GPU that has it.
        gradient_checkpointing: recompute activations in the backward pass, to save memory.
        micro_batch: most sequences that a process reads at once; gradients are summed over them. None: all.
        compile: run the backbone through `torch.compile`.
        curve_every_steps: steps between points of the curve.
        validate_every_steps: steps between validations, where a stage holds sequences out.
        probe: probe settings that suit the trained model (records, length_tokens, items).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    purpose: str = ""
    seed: int = Field(ge=0)
    threads: int = Field(default=1, ge=1)
    architecture: Literal["compressed_qwen3", "deepseek_v4"] = "compressed_qwen3"
    model: dict[str, Any]
    tokenizer: str | None = None
    stages: tuple[Stage, ...] = Field(min_length=1)
    optimiser: Optimiser
    device: Literal["auto", "cpu"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    gradient_checkpointing: bool = False
    micro_batch: int | None = Field(default=None, ge=1)
    compile: bool = False
    curve_every_steps: int = Field(default=20, ge=1)
    validate_every_steps: int = Field(default=200, ge=1)
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
    raw = read_yaml(path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise IsophaseError(f"--set {override!r} is not key=value.", "For example --set seed=2.")
        try:
            set_key(raw, key, yaml.safe_load(value), "--set ")
        except yaml.YAMLError as error:
            raise IsophaseError(f"--set {override!r}: the value is not YAML.", "For example --set seed=2.") from error
    return check_recipe(raw, path)


def set_key(raw: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Change one setting of a recipe that is not checked yet, in place.

    Args:
        raw: the recipe.
        key: dotted, such as `model.compression_stride`.
        value: the new value.
        where: begins the message of a fault, such as `--set `.

    Raises:
        IsophaseError: where the key goes through something that holds no keys.
    """
    node = raw
    *parents, last = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise IsophaseError(f"{where}{key}: {parent!r} holds a single value.", "Check the recipe's keys.")
    node[last] = value


def check_recipe(raw: dict[str, Any], path: Path) -> Recipe:
    """Check settings.

    Args:
        raw: the settings.
        path: where they come from, for the message.

    Raises:
        IsophaseError: for an unknown or impossible setting.
    """
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IsophaseError(
            f"{path}: {where}: {first['msg']} (given: {first['input']!r}).", "See docs/guides/train-matched-models.md."
        ) from error


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Settings of a YAML file, put upon those of its `base`, unchecked.

    Args:
        path: the file.
        above: files whose base it is, so that a circle is found.

    Raises:
        IsophaseError: for a missing file, bad YAML or a circle.
    """
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
    merged = read_yaml(path.parent / base, (*above, path.resolve()))
    for key, value in raw.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
