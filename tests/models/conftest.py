"""Tiny random models whose every parameter matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from isophase.models.compat import cache_argument
from isophase.models.config import CompressedQwen3Config
from isophase.models.memory import CompressedCache
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

VOCABULARY = 61

MakeModel = Callable[..., CompressedQwen3ForCausalLM]
Read = Callable[..., tuple[torch.Tensor, CompressedCache | None]]


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@cache
def _make(window: int | None, stride: int | None, local: int, layers: int, settings: frozenset[Any]) -> Any:
    changes = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        **dict(settings),
    }
    config = CompressedQwen3Config(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        compression_window=window,
        compression_stride=stride,
        local_window=local,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CompressedQwen3ForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norm weights and gate biases start as constants; at random values they must be used right.
                centre = 1.0 if "norm" in name else 0.0
                parameter.normal_(centre, 0.5 if name.endswith("gate_bias_WK") else 0.3)
    return model


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """`make_model(window, stride, local, layers, **config)`: cached, in eval mode; do not change it."""

    def make(
        window: int | None, stride: int | None, local: int = 5, layers: int = 2, **settings: Any
    ) -> CompressedQwen3ForCausalLM:
        return _make(window, stride, local, layers, frozenset(settings.items()))

    return make


@pytest.fixture(scope="session")
def read() -> Read:
    """`read(model, ids, cuts, memory)`: logits and memory after reading `ids` in parts cut at `cuts`.

    `cuts=None` reads in one shot without a memory.
    """

    @torch.no_grad()
    def read_in_parts(
        model: CompressedQwen3ForCausalLM,
        ids_BT: torch.Tensor,
        cuts: list[int] | None = None,
        memory: CompressedCache | None = None,
    ) -> tuple[torch.Tensor, CompressedCache | None]:
        if cuts is None and memory is None:
            return model(ids_BT, use_cache=False).logits, None
        memory = CompressedCache(model.config) if memory is None else memory
        edges = [0, *(cuts or []), ids_BT.shape[1]]
        logits = [
            model(ids_BT[:, first:last], use_cache=True, **cache_argument(memory)).logits
            for first, last in pairwise(edges)
        ]
        return torch.cat(logits, dim=1), memory

    return read_in_parts


@pytest.fixture(scope="session")
def draw_ids() -> Callable[..., torch.Tensor]:
    """`draw_ids(rows, tokens, seed)`: random ids without padding and end-of-text."""

    def draw(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))

    return draw
