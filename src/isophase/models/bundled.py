"""The checkpoints that ship with the package: what they are and how they were trained."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

CHECKPOINTS = Path(__file__).parent / "checkpoints"


class TrainingRecord(BaseModel):
    """`training.json` beside every checkpoint that `isophase train` wrote."""

    model_config = ConfigDict(extra="forbid")

    name: str
    purpose: str
    parameters: int
    weights_bytes: int
    window_tokens: int | None
    stride_tokens: int | None
    kv_heads: int
    layers: int
    hidden_size: int
    seed: int
    steps: int
    sequences: int
    tokens: int
    seconds: float
    threads: int
    final_loss: float
    final_accuracy: float
    versions: dict[str, str]
    command: str
    probe: dict[str, int | str]


def bundled_names() -> list[str]:
    """Names of the bundled models, in alphabetical order."""
    return sorted(p.parent.name for p in CHECKPOINTS.glob("*/training.json"))


def bundled_folder(name: str) -> Path:
    """Folder of a bundled model.

    Raises:
        KeyError: if there is no such model.
    """
    folder = CHECKPOINTS / name
    if name not in bundled_names():
        raise KeyError(name)
    return folder


def memory_words(name: str) -> str:
    """How a bundled model cuts its cache, in words."""
    config = json.loads((bundled_folder(name) / "config.json").read_text())
    rule = config.get("chunk_rule", "fixed")
    if rule == "fixed":
        window, stride = config.get("compression_window"), config.get("compression_stride")
        return "none" if stride is None else f"W{window}/S{stride}"
    score = {"hash": "a hash", "ranks": "ranks of tokens"}.get(config["chunk_score"], config["chunk_score"])
    overlap = config["chunk_overlap"]
    return (
        f"by content ({rule.replace('_', ' ')} of {score} within {config['chunk_radius']} tokens, at most "
        f"{config['chunk_max_tokens']}" + (f", overlap {overlap})" if overlap else ")")
    )


def training_record(name: str) -> TrainingRecord:
    """How a bundled model was trained."""
    return TrainingRecord.model_validate(json.loads((bundled_folder(name) / "training.json").read_text()))
