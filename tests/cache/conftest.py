"""Tiny random models of many families, and the attention that they really pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

VOCABULARY = 89
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi": PhiConfig,
    "phi3": Phi3Config,
    "gpt_neox": GPTNeoXConfig,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
    "cohere": CohereConfig,
    "starcoder2": Starcoder2Config,
}
MakeModel = Callable[..., Any]


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@cache
def _make(family: str, attention: str, dtype: torch.dtype, layers: int, window: int | None) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": attention,
    }
    if family in ("mistral", "starcoder2", "phi3"):
        settings["sliding_window"] = window
    if family in ("gemma2", "gemma3"):
        settings["sliding_window"] = window or 12
        settings["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    if family.startswith("gemma") or family == "qwen3":
        settings["head_dim"] = 12  # not hidden size by heads
    config = FAMILIES[family](**settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().to(dtype)
        model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def make_model() -> MakeModel:
    """A model, two layers unless said: `make_model(family, attention=, dtype=, layers=, window=)`."""

    def make(
        family: str = "llama",
        *,
        attention: str = "sdpa",
        dtype: torch.dtype = torch.float32,
        layers: int = 2,
        window: int | None = None,
    ) -> Any:
        return _make(family, attention, dtype, layers, window)

    return make


def random_ids(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids without the special ones, [rows, length]."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(name="random_ids")
def _random_ids() -> Callable[..., torch.Tensor]:
    return random_ids
