"""Every attribute of the compressor: streaming equals one shot, and DeepSeek V4's kernel is one of its settings."""

from __future__ import annotations

import itertools

import pytest
import torch

from isophase.models.chunks import ChunkReader
from isophase.models.compat import cache_argument
from isophase.models.config import CompressedQwen3Config
from isophase.models.masks import dense_mask
from isophase.models.memory import CompressedCache
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

VARIANTS = [
    {},
    {"gate": "vector"},
    {"gate": "uniform"},
    {"gate_bias": False},
    {"tied_key_value": True},
    {"gate": "uniform", "tied_key_value": True, "post_norm": True},
    {"qk_norm": False},
    {"rotary_dims": 0},
    {"rotary_dims": 4},
    {"local_memory": "tail"},
    {"slot_parameters": "shared"},
    {"slot_parameters": "series", "gate": "vector", "tied_key_value": True, "post_norm": True, "rotary_dims": 4},
]
GRIDS = [(4, 4), (8, 4), (8, 6), (2, 2), (6, 6), (12, 12), (32, 16)]


def build(window: int, stride: int, **changes: object) -> CompressedQwen3ForCausalLM:
    torch.manual_seed(3)
    config = CompressedQwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=changes.pop("kv_heads", 2),
        head_dim=8,
        compression_window=window,
        compression_stride=stride,
        local_window=5,
        initializer_range=0.3,
        embedding_range=1.0,
        **changes,
    )
    model = CompressedQwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_bias_WK"):
                parameter.normal_()
    return model


@pytest.mark.parametrize(
    ("variant", "grid"),
    [(v, g) for v, g in itertools.product(VARIANTS, GRIDS) if "series" not in v.values() or g[0] % g[1] == 0],
    ids=str,
)
def test_every_variant_streams(variant: dict[str, object], grid: tuple[int, int]) -> None:
    model = build(*grid, **dict(variant))
    ids = torch.randint(0, 40, (2, 41))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cut in (1, 3, grid[1], grid[0] + 1, 40):
            memory = CompressedCache(model.config)
            split = [ids[:, :cut], ids[:, cut:-1], ids[:, -1:]]
            parts = [model(part, **cache_argument(memory)).logits for part in split if part.shape[1]]
            assert torch.allclose(torch.cat(parts, dim=1), whole, atol=2e-4)
            assert memory.layers[0].keys.shape[2] == 41 // grid[1]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_kv_heads(kv_heads: int) -> None:
    model = build(8, 8, kv_heads=kv_heads)
    assert model.model.layers[0].self_attn.compressor.keys.gate_bias_WK.shape == (8, kv_heads)


def test_tail_memory_reads_the_open_stride_and_nothing_older() -> None:
    model = build(4, 4, local_memory="tail")
    positions = torch.arange(12)
    (chunks, *_), _ = ChunkReader(model.config).read(torch.zeros(1, 12, dtype=torch.long), torch.zeros(1, 12, 16), None)
    mask = dense_mask(model.config, chunks, 0, positions, torch.float32)[0, 0]
    for query in range(12):
        closed = (query + 1) // 4
        entries = {e for e in range(3) if mask[query, e] == 0}
        tokens = {t for t in range(12) if mask[query, 3 + t] == 0}
        assert entries == set(range(closed))
        assert tokens == set(range(closed * 4, query + 1)) | {query}


def test_uniform_gates_average_and_have_no_parameters() -> None:
    branch = build(8, 8, gate="uniform").model.layers[0].self_attn.compressor.keys
    windows = torch.randn(2, 3, 8, 16)
    weights = branch.weights(windows, torch.ones(1, 3, 8, dtype=torch.bool))
    assert torch.allclose(weights, torch.full_like(weights, 1 / 8))
    assert branch.gate_WDK is None
    assert branch.gate_bias_WK is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gate": "cubic"}, "gate='cubic'"),
        ({"local_memory": "none"}, "local_memory"),
        ({"slot_parameters": "pairs"}, "slot_parameters"),
        ({"rotary_dims": 3}, "rotary_dims=3"),
        ({"rotary_dims": 16}, "rotary_dims=16"),
    ],
)
def test_impossible_settings_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(8, 4, **change)
    with pytest.raises(ValueError, match="multiple of the stride"):
        build(8, 6, slot_parameters="series")


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = build(8, 8).train()
    ids = torch.randint(0, 40, (2, 24))
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            # The name since transformers 5.24, else the older one.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_the_deepseek_kernel_is_one_of_its_settings() -> None:
    """W8/S4, two series, vector gates, tied: equal to transformers' CSA compressor on copied weights."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    width, rotary, hidden = 8, 4, 16
    config = DeepseekV4Config(
        vocab_size=40,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=width,
        q_lora_rank=8,
        index_head_dim=8,
        index_n_heads=2,
        layer_types=["compressed_sparse_attention"],
        partial_rotary_factor=rotary / width,
    )
    theirs = deepseek.DeepseekV4CSACompressor(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.5)

    theta = config.rope_parameters["compress"]["rope_theta"]
    ours = build(
        8,
        4,
        kv_heads=1,
        slot_parameters="series",
        gate="vector",
        tied_key_value=True,
        post_norm=True,
        qk_norm=False,
        rotary_dims=rotary,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    attention = ours.model.layers[0].self_attn
    branch = attention.compressor.keys
    # Theirs: [plain | rotated, pairs interleaved]. Ours: [rotated, first halves then second halves | plain].
    rotated = torch.arange(width - rotary, width)
    order = torch.cat([rotated[0::2], rotated[1::2], torch.arange(width - rotary)])
    with torch.no_grad():
        for mine, linear in ((branch.payload_WDC, theirs.kv_proj), (branch.gate_WDK, theirs.gate_proj)):
            mine.copy_(linear.weight.view(2, width, hidden)[:, order].transpose(1, 2))
        branch.gate_bias_WK.copy_(theirs.position_bias.view(4, 2, width).transpose(0, 1).reshape(8, width)[:, order])
        branch.post_norm.weight.copy_(theirs.kv_norm.weight[order])

    x = torch.randn(2, 27, hidden)
    positions = torch.arange(27)[None].expand(2, -1)
    with torch.no_grad():
        expected = theirs(x, torch.randn(2, 27, 8), positions, None, 0)[0][:, 0][..., order]
        for cut in (27, 9):  # in one go, and continued as in decoding
            memory = CompressedCache(ours.config)
            for part in (x[:, :cut], x[:, cut:]):
                if part.shape[1]:
                    run_attention(ours, part, memory)
            assert torch.allclose(memory.layers[0].keys[:, 0], expected, atol=1e-5)


def run_attention(model: CompressedQwen3ForCausalLM, hidden: torch.Tensor, memory: CompressedCache) -> None:
    """The first layer's attention on given hidden states."""
    backbone, past, length = model.model, memory.get_seq_length(), hidden.shape[1]
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long)
    (chunks, *_), memory.chunks = ChunkReader(model.config).read(ids, hidden, memory.chunks)
    positions = torch.arange(past, past + length)
    backbone.layers[0].self_attn(
        hidden,
        rotary=backbone.rotary_emb(hidden, positions),
        entry_rotary=backbone._entry_rotary(hidden, chunks),
        mask=dense_mask(model.config, chunks, past, positions, hidden.dtype),
        memory=memory,
        chunks=chunks,
    )


@pytest.mark.parametrize("variant", [{}, {"local_memory": "tail"}])
def test_few_logits_equal_the_last_of_all(variant: dict[str, object]) -> None:
    model = build(8, 4, **variant)
    ids = torch.randint(0, 40, (2, 30))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for keep in (1, 3, 30):
            assert torch.allclose(model(ids, use_cache=False, logits_to_keep=keep).logits, whole[:, -keep:], atol=1e-5)
        memory = CompressedCache(model.config)
        model(ids[:, :13], logits_to_keep=1, **cache_argument(memory))
        rest = model(ids[:, 13:], logits_to_keep=2, **cache_argument(memory)).logits
        assert torch.allclose(rest, whole[:, -2:], atol=1e-4)
        states = model(ids, use_cache=False, logits_to_keep=1, output_hidden_states=True).hidden_states
        assert all(state.shape[1] == 30 for state in states)
