"""What cannot be compressed is refused in words that name what would work."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    MergedChunks,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    compress,
)
from isophase.chunking.rules import LocalMaximum, NeighbourCosine
from isophase.models.compat import cache_argument


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (ChunkKV, {}, "0 of budget, ratio and budget_bytes"),
        (ChunkKV, {"budget": 64, "ratio": 0.5}, "2 of budget, ratio and budget_bytes"),
        (SnapKV, {"budget": 31}, "budget 31 is below the window of 32 tokens"),
        (ChunkKV, {"budget": 15}, "below the window of 16 tokens"),
        (ChunkKV, {"ratio": 0}, "ratio 0 must lie above 0"),
        (ChunkKV, {"ratio": 1.2}, "ratio 1.2"),
        (ChunkKV, {"budget_bytes": 0}, "budget_bytes 0"),
        (ChunkKV, {"budget": 64, "window_tokens": 0}, "window_tokens 0"),
        (ChunkKV, {"budget": 64, "every_tokens": 0}, "every_tokens 0"),
        (ChunkKV, {"budget": 64, "chunk_tokens": 0}, "chunk_tokens 0"),
        (ChunkKV, {"budget": 64, "shift_tokens": 10}, "shift_tokens 10 must lie in 0..9"),
        (ChunkKV, {"budget": 64, "reuse_layers": 0}, "reuse_layers 0"),
        (ChunkKV, {"budget": (64, 32), "reuse_layers": 2}, "need one budget"),
        (ChunkKV, {"budget": ((64, 8),)}, "budget 8 is below the window of 16 tokens"),
        (ChunkKV, {"budget": (64, (64, 32))}, "mixes numbers and heads"),
        (ChunkKV, {"budget": ((64, 32), (32, 64)), "reuse_layers": 2}, "need one budget"),
        (ChunkKV, {"budget": ((64, 32),), "share_heads": True}, "heads that share a choice need one budget"),
        (StreamingLLM, {"budget": ((64, 4),)}, "below 4 sink tokens"),
        (SnapKV, {"budget": 64, "kernel_tokens": 4}, "kernel_tokens 4 must be odd"),
        (SnapKV, {"budget": 64, "pooling": "min"}, "pooling 'min'"),
        (StreamingLLM, {"budget": 4}, "below 4 sink tokens"),
        (StreamingLLM, {"budget": 4, "sink_tokens": -1}, "sink_tokens -1"),
        (VotedChunkKV, {"budget": 64, "votes": 11}, "votes 11 must lie in 1..10"),
        (VotedChunkKV, {"budget": 64, "chunk_tokens": 0}, "chunk_tokens 0"),
        (MergedChunks, {"budget": 64, "merged_share": 2}, "merged_share 2"),
        (MergedChunks, {"budget": 64, "weights": "max"}, "weights 'max'"),
        (MergedChunks, {"budget": 64, "reuse_layers": 2}, "cannot reuse"),
        (DynamicChunkKV, {"budget": 64, "average": "median"}, "average 'median'"),
        (
            DynamicChunkKV,
            {"budget": 64, "rule": LocalMaximum(score=NeighbourCosine(), radius_tokens=2, max_tokens=9)},
            "NeighbourCosine reads hidden states",
        ),
    ],
)
def test_settings(method, settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        method(**settings)


METHOD = ChunkKV(budget=20, window_tokens=6)


def test_an_encoder() -> None:
    config = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="has an encoder; compression works for decoders"):
        compress(T5ForConditionalGeneration(config), METHOD)


def test_attention_of_its_own() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=30, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"does not use transformers' attention interface.*Llama"):
        compress(model, METHOD)


def test_layers_of_another_kind() -> None:
    config = Qwen3NextConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=4,
        linear_value_head_dim=4, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="compression works for models"):
        compress(Qwen3NextForCausalLM(config), METHOD)


def test_sliding_layers_only(make_model) -> None:
    with pytest.raises(ValueError, match="every layer of MistralForCausalLM has a sliding window"):
        compress(make_model("mistral", window=12), METHOD)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_other_attention(name, make_model) -> None:
    model = copy.deepcopy(make_model("llama"))
    model.config._attn_implementation_internal = name
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa' or 'eager'"):
        compress(model, METHOD)


@pytest.mark.parametrize("name", ["static", "quantized", "offloaded"])
def test_other_caches(name, make_model) -> None:
    model = copy.deepcopy(make_model("llama"))
    model.generation_config.cache_implementation = name
    with pytest.raises(ValueError, match=f"asks for a {name} cache.*cache_implementation = None"):
        compress(model, METHOD)


def test_number_of_budgets(make_model) -> None:
    with pytest.raises(ValueError, match="3 budgets for 2 full-attention layers"):
        compress(make_model("llama"), SnapKV(budget=(64, 64, 64)))
    with pytest.raises(ValueError, match="3 budgets for 2 KV heads in layer 0; give 2, or one number"):
        compress(make_model("llama"), SnapKV(budget=((64, 64, 32),)))
    with pytest.raises(ValueError, match="1 budgets for 2 KV heads in layer 1"):
        compress(make_model("gemma3"), SnapKV(budget=((64,),)))


@pytest.mark.parametrize(("family", "least"), [("llama", 256), ("gpt_neox", 512), ("gemma3", 192)])
def test_bytes_below_one_entry(family, least, make_model, random_ids) -> None:
    model = make_model(family)
    with pytest.raises(ValueError, match=f"less than one entry in all layers and heads, {least} bytes"):
        compress(model, ChunkKV(budget_bytes=least - 1))
    cache = compress(model, ChunkKV(budget_bytes=least))
    with torch.no_grad():
        model(random_ids(30), **cache_argument(cache))
    assert cache.stored_bytes() == least


def test_a_cache_is_no_method(make_model) -> None:
    model = make_model("llama")
    with pytest.raises(TypeError, match=r"StaticCache is no method; give one such as ChunkKV\(budget=128\)"):
        compress(model, StaticCache(config=model.config, max_cache_len=40))


def test_attention_changed_since(make_model, random_ids) -> None:
    model = copy.deepcopy(make_model("llama"))
    cache = compress(model, METHOD)
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention' cannot be compressed; set the model to 'sdpa' or 'eager'"):
        model(random_ids(30), **cache_argument(cache))


def test_merging_where_layers_turn_differently(make_model) -> None:
    with pytest.raises(ValueError, match="one rotary embedding per kind of layer"):
        compress(make_model("gemma3"), MergedChunks(budget=20))


def test_embeddings_instead_of_ids(make_model, random_ids) -> None:
    model = make_model("llama")
    with compress(model, DynamicChunkKV(budget=20)) as cache, pytest.raises(ValueError, match="pass input_ids"):
        model(inputs_embeds=torch.randn(1, 30, 32), **cache_argument(cache))
    assert model.config._attn_implementation == "sdpa"


def test_a_closed_cache(make_model, random_ids) -> None:
    model = make_model("llama")
    cache = compress(model, DynamicChunkKV(budget=20))
    cache.close()
    with pytest.raises(ValueError, match="keep the cache open"), torch.no_grad():
        model(random_ids(30), **cache_argument(cache))


@pytest.mark.parametrize("kind", ["lookup", "assistant", "early exit"])
def test_assisted_generation(kind, make_model, random_ids) -> None:
    model = make_model("llama")
    how = {
        "lookup": {"prompt_lookup_num_tokens": 2},
        "assistant": {"assistant_model": copy.deepcopy(model)},
        "early exit": {"assistant_early_exit": 1},
    }[kind]
    cache = compress(model, METHOD)
    with pytest.raises(ValueError, match=r"dropped tokens do not come back.*leave out assistant_model"):
        model.generate(random_ids(40), max_new_tokens=4, **how, **cache_argument(cache))
    assert cache.get_seq_length() == 0
    assert model.config._attn_implementation == "sdpa"
    model.generate(random_ids(40), max_new_tokens=2, **cache_argument(cache))
    assert cache.get_seq_length() == 41


def test_two_caches_for_one_generate(make_model, random_ids) -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"`cache_implementation`.*use only one of the two"):
        model.generate(
            random_ids(40), max_new_tokens=4, cache_implementation="static", **cache_argument(compress(model, METHOD))
        )


def test_cropping_and_copying(make_model, random_ids) -> None:
    model = make_model("llama")
    cache = compress(model, METHOD)
    with torch.no_grad():
        model(random_ids(40), **cache_argument(cache))
    cache.crop(0)
    with pytest.raises(ValueError, match=r"cannot be cropped.*\(plain generation\)"):
        cache.crop(-1)
    with pytest.raises(TypeError, match="make another with compress"):
        copy.deepcopy(cache)
