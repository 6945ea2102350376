"""The model against plain Python loops written from its documentation, one token and one slot at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

GRIDS = [(8, 8), (8, 4), (8, 6), (4, 4), (12, 12), (2, 2), (32, 16), (3, 1), (1, 1)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x_H: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one vector: pairs `(x[i], x[i + H/2])` turn by `position * theta^(-2i/H)`."""
    half = len(x_H) // 2
    out = torch.empty_like(x_H)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x_H)), dtype=x_H.dtype)
        a, b = x_H[i], x_H[i + half]
        out[i] = a * torch.cos(angle) - b * torch.sin(angle)
        out[i + half] = b * torch.cos(angle) + a * torch.sin(angle)
    return out


def entry_of(branch: Any, hidden_TD: torch.Tensor, entry: int, head: int, window: int, stride: int) -> torch.Tensor:
    """`sum_i softmax_i(Z_i h_i + b_i) C_i h_i` over the slots that hold a token."""
    start = (entry + 1) * stride - window
    width = branch.head_width
    scores, payloads = [], []
    for slot in range(window):
        if start + slot < 0:
            continue
        h = hidden_TD[start + slot]
        scores.append(h @ branch.gate_WDK[slot, :, head] + branch.gate_bias_WK[slot, head])
        payloads.append(h @ branch.payload_WDC[slot, :, head * width : (head + 1) * width])
    weights = torch.softmax(torch.stack(scores), dim=0)
    return sum(w * p for w, p in zip(weights, payloads, strict=True))


def attention(layer: Any, hidden_TD: torch.Tensor, config: Any) -> torch.Tensor:
    attn, grid = layer.self_attn, config.grid
    theta, eps, H = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    T, groups = len(hidden_TD), config.num_attention_heads // config.num_key_value_heads
    outputs = []
    for t in range(T):
        heads = []
        for q in range(config.num_attention_heads):
            kv = q // groups
            rows = slice(kv * H, (kv + 1) * H)
            query = rotate(
                rms_norm(attn.q_proj.weight[q * H : (q + 1) * H] @ hidden_TD[t], attn.q_norm.weight, eps),
                t,
                theta,
            )
            keys, values = [], []
            first_local = 0 if grid is None else max(0, t - config.local_window + 1)
            for e in range(T // grid.stride_tokens if grid is not None else 0):
                if (e + 1) * grid.stride_tokens - 1 > t:  # not closed yet
                    continue
                W, S = grid.window_tokens, grid.stride_tokens
                key = entry_of(attn.compressor.keys, hidden_TD, e, kv, W, S)
                keys.append(rotate(rms_norm(key, attn.k_norm.weight, eps), e * S, theta))
                values.append(entry_of(attn.compressor.values, hidden_TD, e, kv, W, S))
            for s in range(first_local, t + 1):
                key = rms_norm(attn.k_proj.weight[rows] @ hidden_TD[s], attn.k_norm.weight, eps)
                keys.append(rotate(key, s, theta))
                values.append(attn.v_proj.weight[rows] @ hidden_TD[s])
            weights = torch.softmax(torch.stack([query @ k for k in keys]) * H**-0.5, dim=0)
            heads.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        outputs.append(attn.o_proj.weight @ torch.cat(heads))
    return torch.stack(outputs)


def slow_logits(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    config = model.config
    x = model.model.embed_tokens.weight[ids_T]
    for layer in model.model.layers:
        x = x + attention(layer, rms_norm(x, layer.input_layernorm.weight, config.rms_norm_eps), config)
        h = rms_norm(x, layer.post_attention_layernorm.weight, config.rms_norm_eps)
        gate = nn.functional.silu(h @ layer.mlp.gate_proj.weight.T)
        x = x + (gate * (h @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return rms_norm(x, model.model.norm.weight, config.rms_norm_eps) @ model.lm_head.weight.T


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("window", "stride"), GRIDS)
@torch.no_grad()
def test_forward_equals_the_formula(make_model, draw_ids, window, stride, layers) -> None:
    tokens = 19 if window < 32 else 35
    model = make_model(window, stride, local=3, layers=layers)
    ids = draw_ids(1, tokens)
    torch.testing.assert_close(model(ids).logits[0], slow_logits(model, ids[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("local", [1, 2, 16])
@torch.no_grad()
def test_local_window_of_any_size(make_model, draw_ids, local) -> None:
    model = make_model(8, 4, local=local, layers=1)
    ids = draw_ids(1, 18)
    torch.testing.assert_close(model(ids).logits[0], slow_logits(model, ids[0]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_without_compression(make_model, draw_ids) -> None:
    model = make_model(None, None)
    ids = draw_ids(1, 14)
    torch.testing.assert_close(model(ids).logits[0], slow_logits(model, ids[0]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_one_kv_head_and_one_per_query_head(make_model, draw_ids) -> None:
    for kv_heads in (1, 4):
        model = make_model(4, 4, local=2, layers=1, num_key_value_heads=kv_heads)
        ids = draw_ids(1, 13)
        torch.testing.assert_close(model(ids).logits[0], slow_logits(model, ids[0]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_eager_attention_gives_the_same_and_shows_its_weights(make_model, draw_ids) -> None:
    model = make_model(4, 4, local=3)
    ids = draw_ids(2, 13)
    expected = model(ids).logits
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        outputs = model(ids, output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)
    assert len(outputs.attentions) == 2
    weights = outputs.attentions[0]
    assert weights.shape == (2, 4, 13, 3 + 13)  # entries, then tokens
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 13))
    for t in range(13):
        seen = [e for e in range(3) if bool((weights[:, :, t, e] > 0).all())]
        assert seen == [e for e in range(3) if (e + 1) * 4 - 1 <= t]
