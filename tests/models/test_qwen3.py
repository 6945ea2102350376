"""Twins: equal to transformers' Qwen3 without compression; saved and loaded through the Auto classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from isophase.models.config import CompressedQwen3Config
from isophase.models.qwen3 import CompressedQwen3ForCausalLM, CompressedQwen3Model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_without_compression_it_is_qwen3(draw_ids, changes) -> None:
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(Qwen3Config(**SIZES, **changes)).eval()
    ours = CompressedQwen3ForCausalLM(CompressedQwen3Config(**SIZES, **changes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0.2, 0.3)
    shapes = {name: tensor.shape for name, tensor in reference.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == shapes
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in reference.parameters())
    ours.load_state_dict(reference.state_dict())
    ids = draw_ids(2, 33)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)
        ours_loss, reference_loss = ours(ids, labels=ids).loss, reference(ids, labels=ids).loss
    torch.testing.assert_close(ours_loss, reference_loss)


def test_compression_adds_the_compressor_and_nothing_else() -> None:
    full = CompressedQwen3ForCausalLM(CompressedQwen3Config(**SIZES))
    config = CompressedQwen3Config(**SIZES, compression_window=8, compression_stride=4)
    compressed = CompressedQwen3ForCausalLM(config)
    added = set(compressed.state_dict()) - set(full.state_dict())
    assert set(full.state_dict()) <= set(compressed.state_dict())
    assert all(".self_attn.compressor." in name for name in added)
    count = sum(compressed.state_dict()[name].numel() for name in added)
    # Keys and values; by offset: payload to all KV heads, a gate and its bias for each.
    assert count == 2 * 2 * 8 * (24 * 2 * 8 + 24 * 2 + 2)


@pytest.mark.parametrize("grid", [(8, 4), (8, 8), (None, None)])
def test_saved_and_loaded_it_is_the_same(make_model, draw_ids, tmp_path: Path, grid) -> None:
    model, ids = make_model(*grid), draw_ids(2, 21)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, CompressedQwen3Config)
    assert (config.compression_window, config.compression_stride, config.local_window) == (*grid, 5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is CompressedQwen3ForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in loaded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is CompressedQwen3Model
    # Saved again, the same bytes.
    loaded.save_pretrained(tmp_path / "again")
    weights = "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / weights).read_bytes()


def test_tied_embeddings_survive_saving(make_model, draw_ids, tmp_path: Path) -> None:
    model, ids = make_model(8, 4, tie_word_embeddings=True), draw_ids(1, 21)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("grid", [(8, 4), (8, 8), (4, 4), (None, None)])
def test_gradients_reach_every_parameter(make_model, draw_ids, grid) -> None:
    model = CompressedQwen3ForCausalLM(make_model(*grid).config).train()
    ids = draw_ids(4, 33)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_every_offset_has_its_own_parameters_in_use(make_model, draw_ids) -> None:
    model = CompressedQwen3ForCausalLM(make_model(8, 4).config).train()
    ids = draw_ids(4, 33)
    model(ids, labels=ids).loss.backward()
    for branch in ("keys", "values"):
        parameters = getattr(model.model.layers[0].self_attn.compressor, branch)
        for tensor in parameters.parameters():
            assert (tensor.grad.flatten(1).abs().sum(1) > 0).all()


def test_initialisation_follows_the_configuration() -> None:
    config = CompressedQwen3Config(
        **{**SIZES, "hidden_size": 96, "vocab_size": 999},
        compression_window=8,
        compression_stride=8,
        initializer_range=0.1,
        embedding_range=1.0,
    )
    torch.manual_seed(0)
    model = CompressedQwen3ForCausalLM(config)
    branch = model.model.layers[0].self_attn.compressor.values
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert branch.payload_WDC.std().item() == pytest.approx(0.1, rel=0.05)
    assert branch.gate_WDK.std().item() == pytest.approx(0.1, rel=0.2)
    assert not branch.gate_bias_WK.any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compression_window": 4, "compression_stride": 8}, ["stride 8", "window 4", "at most the window"]),
        ({"compression_window": 4}, ["compression_window=4", "compression_stride=None", "give both"]),
        ({"compression_stride": 4}, ["compression_window=None", "compression_stride=4", "give both"]),
        ({"compression_window": 4, "compression_stride": 0}, ["stride 0", "at least 1"]),
        ({"compression_window": 4.5, "compression_stride": 4}, ["compression_window=4.5", "whole number"]),
        ({"compression_window": 4, "compression_stride": "4"}, ["compression_stride='4'", "whole number"]),
        (
            {"compression_window": 4, "compression_stride": 4, "local_window": 0},
            ["local_window=0", "at least 1"],
        ),
        ({"local_window": None}, ["local_window=None", "whole number"]),
    ],
)
def test_impossible_settings_are_refused_in_one_line(settings, words) -> None:
    with pytest.raises(ValueError) as caught:
        CompressedQwen3Config(**settings)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
