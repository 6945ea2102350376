"""Strides as the configurations of real architectures name them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from isophase.models.config import CompressedQwen3Config
from isophase.targets.strides import grids_of

SMALL: dict[str, Any] = {"num_hidden_layers": 3}


def found(config: Any) -> list[tuple[int, str, str]]:
    return [(g.stride_tokens, g.kind, g.setting) for g in grids_of(config)]


def test_deepseek_v4() -> None:
    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    rates = {csa: 4, hca: 128}
    assert found(transformers.DeepseekV4Config()) == [
        (4, "payload", f"compress_rates.{csa}"),
        (128, "payload", f"compress_rates.{hca}"),
    ]
    only = transformers.DeepseekV4Config(
        num_hidden_layers=2, layer_types=["sliding_attention", csa], compress_rates=rates
    )
    assert found(only) == [(4, "payload", f"compress_rates.{csa}")]
    none = transformers.DeepseekV4Config(num_hidden_layers=1, layer_types=["sliding_attention"])
    assert found(none) == []
    exact = transformers.DeepseekV4Config(num_hidden_layers=1, layer_types=[csa], compress_rates={csa: 1, hca: 128})
    assert found(exact) == []


def test_ours() -> None:
    config = CompressedQwen3Config(compression_window=8, compression_stride=4)
    assert found(config) == [(4, "payload", "compression_stride")]
    assert found(CompressedQwen3Config()) == []


@pytest.mark.parametrize("nested", [False, True])
def test_selectors(nested: bool) -> None:
    cases = [
        ("glm5_next", "index_kpool"),
        ("qwen4_exp", "indexer_compress_ratio"),
        ("minimax_m3_vl", "index_block_size"),
    ]
    for model_type, setting in cases:
        config = transformers.AutoConfig.for_model(model_type)
        part = config.get_text_config() if nested else config
        expected = getattr(config.get_text_config(), setting, None)
        if expected is None:
            setattr(config.get_text_config(), setting, 4)
            expected = 4
        assert found(part) == [(expected, "selector", setting)], (model_type, part.model_type)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gpt_neox", "mistral"])
def test_models_without_a_grid(model_type: str) -> None:
    assert found(transformers.AutoConfig.for_model(model_type)) == []
