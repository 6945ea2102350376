"""Runs without a model, and one tiny real model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from isophase.audit.plan import OpenTarget, make_plan
from isophase.audit.run import run_plan
from isophase.audit.settings import AuditSettings, Plan
from isophase.targets import open_target

PLANTED = "planted:period=8,amplitude=.2,accuracy=.75"


@pytest.fixture
def settings() -> Callable[..., AuditSettings]:
    def build(target: str = PLANTED, **changes: Any) -> AuditSettings:
        values = {"targets": (target,), "control": "none", "items": 8, "window_tokens": 8, "shifts": 999}
        return AuditSettings.model_validate(values | changes)

    return build


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Plan, Path]]:
    """Plan and ask into a fresh folder below `tmp_path`."""

    def build(chosen: AuditSettings, name: str = "run", opener: OpenTarget | None = None) -> tuple[Plan, Path]:
        opener = opener or cache(open_target)
        plan = make_plan(chosen, opener, pilot=True)
        run_plan(plan, tmp_path / name, opener)
        return plan, tmp_path / name

    return build


@pytest.fixture
def tokenizer_of() -> Callable[[str], Any]:
    return lambda spec: open_target(spec).tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained compressed model of a few thousand parameters with the bundled vocabulary."""
    torch = pytest.importorskip("torch")
    from isophase.lab.train.run import pairs_tokenizer
    from isophase.models.config import CompressedQwen3Config
    from isophase.models.qwen3 import CompressedQwen3ForCausalLM
    from isophase.probes.pairs import WORDS

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = CompressedQwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        compression_window=8,
        compression_stride=8,
        local_window=8,
        record_style="pairs",
    )
    CompressedQwen3ForCausalLM(config).save_pretrained(folder)
    pairs_tokenizer().save_pretrained(folder)
    return folder
