"""A recipe that trains in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isophase.lab.train.recipe import Recipe

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "purpose": "a test",
    "seed": 5,
    "model": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.12,
        "embedding_range": 1.0,
        "local_window": 4,
    },
    "stages": [
        {"context_tokens": 16, "pairs": 3, "queries": 2, "batch": 4, "steps": 3},
        {"context_tokens": 20, "pairs": 4, "queries": 3, "batch": 2, "steps": 3, "alone": 0.5},
    ],
    "optimiser": {"learning_rate": 0.01, "warmup_steps": 2},
    "probe": {"records": 4, "length_tokens": 32},
}


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Recipe]:
    """`make_recipe(model={...}, **changes)`: model settings are merged, everything else replaced."""

    def make(model: dict[str, Any] | None = None, **changes: Any) -> Recipe:
        return Recipe.model_validate({**SETTINGS, **changes, "model": {**SETTINGS["model"], **(model or {})}})

    return make
