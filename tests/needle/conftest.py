"""A small model of text, with a tokenizer that can spell anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from isophase.probes.lexicon import KEYS, PROSE, VALUES


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


@pytest.fixture
def arguments(folder: Path) -> Callable[..., list[str]]:
    """Arguments of a small run."""

    def make(*more: str) -> list[str]:
        return [
            "needle", f"hf:{folder}", "--lengths", "180,230", "--depths", "2", "--phases", "4",
            "--cache", "full", "--cache", "chunkkv(budget=40, chunk_tokens=4)", "--cache", "dynamic(budget=40)", *more,
        ]  # fmt: skip

    return make
