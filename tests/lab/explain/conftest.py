"""Small models for the tests of `isophase explain`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from isophase.lab.explain.outcomes import Questions, questions_of
from isophase.models.bundled import bundled_folder
from isophase.probes import ProbeSettings, build_probe
from isophase.targets import open_target

SETTINGS = ProbeSettings(
    probe="records", items=4, records=24, length_tokens=114, window_tokens=8, seed=0, style="pairs"
)


def _bundled(name: str = "w8s8") -> tuple[Any, Questions, Any]:
    """A fresh bundled model, its questions, and its tokenizer."""
    target = open_target(f"isophase:{name}")
    return target.model, questions_of(build_probe(SETTINGS, target.tokenizer)), target.tokenizer


def _deepseek(seed: int = 0) -> DeepseekV4ForCausalLM:
    """A tiny random DeepSeek V4, one CSA layer and one HCA layer, gates with a preference."""
    config = DeepseekV4Config(
        vocab_size=195,
        hidden_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        n_routed_experts=1,
        num_experts_per_tok=1,
        mlp_layer_types=["moe", "moe"],
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=64,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("position_bias"):
                parameter.data.normal_(0, 1)
    return model


@pytest.fixture
def deepseek_folder(tmp_path: Path) -> Path:
    """The same as a folder, with the bundled models' tokenizer."""
    folder = tmp_path / "deepseek"
    model = _deepseek()
    model.config.record_style = "pairs"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundled_folder("full") / name).read_bytes())
    # What `isophase train` writes saves the pilot.
    (folder / "training.json").write_text('{"probe": {"records": 4, "length_tokens": 120}}')
    return folder


class _PlantedAttention(nn.Module):
    """Head 0 knows the answer at all phases but the last, head 1 at the last one only."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = 0, vocabulary
        self.o_proj = nn.Linear(2 * vocabulary, vocabulary, bias=False)
        with torch.no_grad():
            self.o_proj.weight.copy_(torch.cat([torch.eye(vocabulary)] * 2, dim=1))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        known = nn.functional.one_hot(ids_BT[:, 0], self.head_dim).float()
        last = ids_BT[:, 1:2].float()
        heads = torch.cat([known * (1 - last), known * last], dim=-1)
        return self.o_proj(heads[:, None].expand(-1, ids_BT.shape[1], -1))


class _PlantedModel(nn.Module):
    """A model whose ids are: the answer, whether the phase is the last one, filler."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.attention = _PlantedAttention(vocabulary)
        text = SimpleNamespace(num_attention_heads=2, num_key_value_heads=2)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def forward(self, ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        return SimpleNamespace(logits=self.attention(ids)[:, -logits_to_keep:])


@pytest.fixture(scope="session")
def bundled() -> Callable[..., tuple[Any, Questions, Any]]:
    """`bundled(name)`: a fresh bundled model, its questions, and its tokenizer."""
    return _bundled


@pytest.fixture(scope="session")
def deepseek() -> Callable[..., Any]:
    """`deepseek(seed)`: a fresh tiny random DeepSeek V4."""
    return _deepseek


@pytest.fixture(params=["w8s8", "deepseek_v4"])
def any_model(request: pytest.FixtureRequest) -> Any:
    """A fresh model of either kind."""
    return _deepseek() if request.param == "deepseek_v4" else _bundled()[0]


@pytest.fixture(scope="session")
def planted() -> Callable[[int], Any]:
    """`planted(vocabulary)`: a model whose two heads are needed at different phases."""
    return _PlantedModel
