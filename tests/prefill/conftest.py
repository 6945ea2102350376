"""Random plans, tiny models, and prompts with known structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from isophase.prefill import Plan
from isophase.probes.lexicon import KEYS, PROSE, VALUES

VOCABULARY = 89
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3": Qwen3Config,
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same random numbers, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@cache
def _make(family: str, attention: str, window: int | None) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 4096,
        "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "mistral":
        settings["sliding_window"] = window
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = FAMILIES[family](**settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """A model of two layers with six query heads: `make_model(family, attention=, window=)`."""

    def make(family: str = "llama", *, attention: str = "sdpa", window: int | None = None) -> Any:
        return _make(family, attention, window)

    return make


def random_plan(
    generator: torch.Generator, *, heads: int, queries: int, past: int, query_tokens: int, key_tokens: int,
    share: float, columns: int, window: int | None,
) -> Plan:  # fmt: skip
    """A plan without any structure."""
    tokens = past + queries
    shape = (heads, -(-queries // query_tokens), -(-tokens // key_tokens))
    chosen = torch.rand(shape, generator=generator) < share
    picked = tuple(
        torch.randperm(tokens, generator=generator)[: int(torch.randint(columns + 1, (1,), generator=generator))]
        .sort()
        .values
        for _ in range(heads)
    )
    return Plan(
        blocks_HQN=chosen, columns=picked, tokens=tokens, first_query=past, query_tokens=query_tokens,
        key_tokens=key_tokens, window_tokens=window,
    )  # fmt: skip


def planted(
    tokens: int, *, columns: torch.Tensor, distance: int, heads: int = 3, width: int = 32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One KV head whose queries read some columns, their neighbourhood, and keys at one distance."""
    code = torch.nn.functional.normalize(torch.randn(tokens, width - 1), dim=-1)
    key = torch.zeros(1, tokens, width)
    key[0, :, 1:] = code
    key[0, columns, 0] = 1.0
    query = torch.zeros(heads, tokens, width)
    query[:, :, 1:] = 16 * code
    query[:, distance:, 1:] += 16 * code[: tokens - distance]
    query[:, :, 0] = 14.0
    return query * width**0.5, key, torch.randn(1, tokens, width)


def random_ids(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids without the special ones, [rows, length]."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(name="random_plan")
def _random_plan() -> Callable[..., Plan]:
    return random_plan


@pytest.fixture(name="planted")
def _planted() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return planted


@pytest.fixture(name="random_ids")
def _random_ids() -> Callable[..., torch.Tensor]:
    return random_ids


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("needle-model")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    # Some words of the records become single tokens, which audits need.
    words = [f" {word}" for word in (*KEYS[:24], *VALUES[:24]) for _ in range(50)]
    inner.train_from_iterator([PROSE, *words], trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(where)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=inner.get_vocab_size(), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            )
        )  # fmt: skip
        model.save_pretrained(where)
    return where
