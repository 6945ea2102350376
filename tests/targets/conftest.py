"""Tiny random models of several architectures, saved with a small trained tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from isophase.models.config import CompressedQwen3Config
from isophase.models.qwen3 import CompressedQwen3ForCausalLM
from isophase.probes import Prompt
from isophase.probes.lexicon import FILLER, KEYS, PROSE, VALUES

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 48}


def _llama(vocabulary: int) -> Any:
    config = transformers.LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **SIZES, **LAYERS)
    return transformers.LlamaForCausalLM(config)


def _qwen2(vocabulary: int) -> Any:
    """One full layer and one whose window is shorter than the prompts."""
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention"],
        **SIZES,
        **LAYERS,
    )
    return transformers.Qwen2ForCausalLM(config)


def _gpt_neox(vocabulary: int) -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=vocabulary, **SIZES, **LAYERS))


def _gpt2(vocabulary: int) -> Any:
    """Learned positions: a prompt beyond them cannot be read at all."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=512,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def _deepseek_v4(vocabulary: int) -> Any:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    config = transformers.DeepseekV4Config(
        vocab_size=vocabulary,
        **{**SIZES, "num_hidden_layers": 3},
        moe_intermediate_size=32,
        head_dim=16,
        q_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=64,
        sliding_window=8,
        layer_types=["sliding_attention", *rates],
        compress_rates=rates,
        mlp_layer_types=["moe"] * 3,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        partial_rotary_factor=0.5,
    )
    return transformers.DeepseekV4ForCausalLM(config)


def _compressed(vocabulary: int) -> Any:
    config = CompressedQwen3Config(
        vocab_size=vocabulary,
        num_key_value_heads=1,
        head_dim=8,
        compression_window=8,
        compression_stride=4,
        local_window=6,
        **SIZES,
        **LAYERS,
    )
    return CompressedQwen3ForCausalLM(config)


MAKERS: dict[str, Callable[[int], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "deepseek_v4": _deepseek_v4,
    "compressed_qwen3": _compressed,
}


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of our own words that puts `<s>` before a text."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " " + " ".join([*KEYS, *VALUES, *FILLER])
    inner.train_from_iterator([PROSE, words, words], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def folder(bpe_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(architecture)`: a saved tiny random model with the tokenizer."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = MAKERS[architecture](len(bpe_tokenizer))
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        # transformers leaves these at zero, which switches off what depends on the phase.
                        if "position_bias" in name or "sinks" in name or name.endswith("gate_bias_WK"):
                            parameter.normal_()
                        elif parameter.dim() > 1:
                            parameter.normal_(0.0, 0.2)
            model.save_pretrained(path)
            bpe_tokenizer.save_pretrained(path)
            made[architecture] = path
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def plain_loop() -> Callable[[Any, Sequence[Prompt]], Iterator[tuple[float, list[int]]]]:
    """Log-probability of the answer and the likeliest token at each of its places, one prompt per forward."""

    @torch.inference_mode()
    def loop(model: Any, prompts: Sequence[Prompt]) -> Iterator[tuple[float, list[int]]]:
        for prompt in prompts:
            ids = torch.tensor([[*prompt.ids.tolist(), *prompt.answer_ids]])
            logits = model(ids, use_cache=False).logits[0, len(prompt.ids) - 1 : -1].double()
            log_p = torch.log_softmax(logits, dim=-1)
            total = sum(float(log_p[place, token]) for place, token in enumerate(prompt.answer_ids))
            yield total, log_p.argmax(-1).tolist()

    return loop
