"""Memories whose chunks follow the content or whose grids are staggered: against an oracle, and in any split."""

from __future__ import annotations

import copy
from itertools import pairwise
from math import log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.chunking.rules import FixedStride, Threshold
from isophase.models.chunks import rules_of
from isophase.models.compat import cache_argument
from isophase.models.config import CompressedQwen3Config
from isophase.models.memory import CompressedCache
from isophase.models.pages import PagedEntries
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

VOCABULARY = 23
DYNAMIC: dict[str, Any] = {"chunk_rule": "local_maximum", "chunk_radius": 2, "chunk_max_tokens": 7}
FIXED: dict[str, Any] = {"compression_window": 6, "compression_stride": 6}
MEMORIES: dict[str, dict[str, Any]] = {
    "hash": DYNAMIC,
    "hash by head": {**DYNAMIC, "chunk_groups": 2},
    "ranks": {**DYNAMIC, "chunk_score": "ranks", "chunk_ranks": [0, 3, 0, 2, 1]},
    "ranks without ties": {**DYNAMIC, "chunk_score": "ranks", "chunk_ranks": [0, 3, 0, 2, 1], "chunk_ties": False},
    "overlap": {**DYNAMIC, "chunk_overlap": 2, "chunk_groups": 2},
    "cosine": {**DYNAMIC, "chunk_score": "cosine"},
    "router": {**DYNAMIC, "chunk_rule": "threshold", "chunk_score": "router", "chunk_groups": 2},
    "cosine above a threshold": {**DYNAMIC, "chunk_rule": "threshold", "chunk_score": "cosine"},
    "shared slots": {**DYNAMIC, "slot_parameters": "shared", "gate": "vector", "chunk_groups": 4},
    "shared and own": {**DYNAMIC, "slot_parameters": "both", "chunk_groups": 2, "chunk_overlap": 1},
    "tied, post-norm": {**DYNAMIC, "tied_key_value": True, "post_norm": True},
    "staggered heads": {**FIXED, "grid_shift": "heads", "chunk_groups": 2},
    "staggered layers": {**FIXED, "grid_shift": "layers"},
    "staggered overlap": {"compression_window": 8, "compression_stride": 4, "grid_shift": "heads", "chunk_groups": 4},
    "fixed, count bias": {**FIXED, "count_bias": True},
    "fixed, sinks": {**FIXED, "sink_tokens": 4},
    "fixed, both": {"compression_window": 6, "compression_stride": 3, "count_bias": True, "sink_tokens": 2},
    "fixed, tail, both": {**FIXED, "local_memory": "tail", "count_bias": True, "sink_tokens": 7},
    "staggered heads, both": {**FIXED, "grid_shift": "heads", "chunk_groups": 2, "count_bias": True, "sink_tokens": 4},
    "staggered layers, both": {**FIXED, "grid_shift": "layers", "count_bias": True, "sink_tokens": 4},
    "hash by head, count bias": {**DYNAMIC, "chunk_groups": 2, "count_bias": True},
    "hash by head, sinks": {**DYNAMIC, "chunk_groups": 2, "sink_tokens": 3},
    "overlap, both": {**DYNAMIC, "chunk_overlap": 2, "chunk_groups": 4, "count_bias": True, "sink_tokens": 1},
    "router, both": {**DYNAMIC, "chunk_score": "router", "chunk_groups": 2, "count_bias": True, "sink_tokens": 5},
    "more sinks than text": {**DYNAMIC, "sink_tokens": 99},
}
memories = st.sampled_from(sorted(MEMORIES))


def build(name: str) -> CompressedQwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = CompressedQwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            local_window=3,
            initializer_range=0.3,
            embedding_range=1.0,
            pad_token_id=0,
            **MEMORIES.get(name, {}),
        )
        model = CompressedQwen3ForCausalLM(config).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith(("gate_bias_WK", "gate_WDK", "payload_WDC")):  # some begin at 0
                    parameter.normal_()
    return model


def text(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def read(model: CompressedQwen3ForCausalLM, ids: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, CompressedCache]:
    memory = CompressedCache(model.config)
    edges = [0, *cuts, ids.shape[1]]
    with torch.no_grad():
        parts = [model(ids[:, a:b], **cache_argument(memory)).logits for a, b in pairwise(edges)]
    return torch.cat(parts, dim=1), memory


@settings(max_examples=60, deadline=None)
@given(memories, st.integers(1, 3), st.integers(2, 45), st.data())
def test_any_split_equals_one_shot(name: str, rows: int, tokens: int, data: st.DataObject) -> None:
    model, ids = build(name), text(rows, tokens)
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=8)))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for split in ([], cuts, list(range(1, tokens)) if tokens < 25 else []):
        logits, memory = read(model, ids, split)
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-4)
        assert memory.get_seq_length() == tokens


@settings(max_examples=20, deadline=None)
@given(memories, st.integers(10, 40))
def test_rows_do_not_depend_on_their_neighbours(name: str, tokens: int) -> None:
    model, ids = build(name), text(3, tokens)
    together, _ = read(model, ids, [tokens // 2])
    for row in range(3):
        alone, _ = read(model, ids[row : row + 1], [])
        torch.testing.assert_close(together[row : row + 1], alone, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_logits_equal_a_slow_oracle(name: str) -> None:
    model, ids = build(name), text(1, 26, seed=4)
    with torch.no_grad():
        found = model(ids, use_cache=False).logits[0]
        torch.testing.assert_close(found, slow_logits(model, ids[0]), atol=5e-5, rtol=1e-4)


def slow_logits(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """One query, one head, one entry at a time, from the descriptions of configuration and rules alone."""
    config, backbone = model.config, model.model
    hidden = backbone.embed_tokens(ids_T)
    chunks = [
        [closed_chunks(rule, ids_T, hidden) for rule in groups] for groups in rules_of(config, list(backbone.routers))
    ]
    for layer, own in zip(backbone.layers, chunks, strict=True):
        hidden = hidden + slow_attention(layer.self_attn, layer.input_layernorm(hidden), own, config, backbone)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(backbone.norm(hidden))


def closed_chunks(rule: Any, ids_T: torch.Tensor, hidden: torch.Tensor) -> list[tuple[int, int, int]]:
    """(start, end, close) of every chunk, from the definition of a start."""
    tokens = len(ids_T)
    if isinstance(rule, FixedStride):
        ahead = -1
        found = [t for t in range(1, tokens + 1) if t % rule.stride_tokens == rule.shift_tokens % rule.stride_tokens]
    elif isinstance(rule, Threshold):
        ahead = 0
        scores = rule.score(ids_T[None], hidden[None], None)[0].tolist()
        found, last = [], 0
        for t in range(1, tokens):
            last = t if scores[t] > rule.threshold else last
            if last == t or (t - last) % rule.max_tokens == 0:
                found.append(t)
    else:
        ahead = radius = rule.radius_tokens
        scores = rule.score(ids_T[None], hidden[None], None)[0].tolist()
        found, last = [], 0
        for t in range(1, tokens - radius):
            content = all(scores[t] > s for s in scores[max(0, t - radius) : t])
            content = content and all(scores[t] >= s for s in scores[t + 1 : t + 1 + radius])
            last = t if content else last
            if content or (t - last) % rule.max_tokens == 0:
                found.append(t)
    return [(a, b, b + ahead) for a, b in pairwise([0, *found]) if b + ahead < tokens]


def slow_entry(branch: Any, hidden: torch.Tensor, start: int, end: int, overlap: int, head: int) -> torch.Tensor:
    width = branch.head_width
    own_payload, own_gate = branch.payload_WDC, branch.gate_WDK
    if branch.common_payload_DC is not None:
        own_payload, own_gate = own_payload + branch.common_payload_DC, own_gate + branch.common_gate_DK
    scores, payloads = [], []
    for token in range(max(0, start - overlap), end):
        slot = token - start + overlap
        group = 0 if branch.groups == 1 else slot
        payloads.append(hidden[token] @ own_payload[group][:, head * width : (head + 1) * width])
        each = own_gate.shape[-1] // branch.heads
        gate = hidden[token] @ own_gate[group][:, head * each : (head + 1) * each]
        scores.append(gate + branch.gate_bias_WK[slot, head * each : (head + 1) * each])
    weights = torch.softmax(torch.stack(scores), dim=0)
    entry = (weights * torch.stack(payloads)).sum(dim=0)
    return entry if branch.post_norm is None else branch.post_norm(entry)


def slow_attention(attn: Any, hidden: torch.Tensor, chunks: Any, config: Any, backbone: Any) -> torch.Tensor:
    from isophase.models.attention import rotate

    H, heads = config.head_dim, config.num_key_value_heads
    fixed = config.chunk_rule == "fixed"

    def turned(state: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(state[None, None, None], backbone.rotary_emb(hidden[None], torch.tensor([position])))[0, 0, 0]

    out = []
    for t in range(len(hidden)):
        by_head = []
        for head in range(heads):
            rows = slice(head * H, (head + 1) * H)
            query = turned(attn.q_norm(attn.q_proj.weight[rows] @ hidden[t]), t)
            keys, values, biases, covered = [], [], [], 0
            for start, end, close in chunks[head * len(chunks) // heads]:
                if close > t:
                    continue
                covered = end
                key = slow_entry(attn.compressor.keys, hidden, start, end, config.overlap_tokens, head)
                keys.append(turned(attn.k_norm(key), start))
                biases.append(log(end - start) if config.count_bias else 0.0)
                branch = attn.compressor.values
                values.append(
                    key if branch is None else slow_entry(branch, hidden, start, end, config.overlap_tokens, head)
                )
            for s in range(t + 1):
                tail = config.local_memory == "tail"
                near = s == t if tail else t - s < config.local_window
                if near or (s >= covered and (tail or not fixed)) or s < config.sink_tokens:
                    keys.append(turned(attn.k_norm(attn.k_proj.weight[rows] @ hidden[s]), s))
                    values.append(attn.v_proj.weight[rows] @ hidden[s])
                    biases.append(0.0)
            products = [query @ k * H**-0.5 + bias for k, bias in zip(keys, biases, strict=True)]
            weights = torch.softmax(torch.stack(products), dim=0)
            by_head.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        out.append(attn.o_proj.weight @ torch.cat(by_head))
    return torch.stack(out)


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_reorder_repeat_and_select_keep_every_row_its_own(name: str) -> None:
    model, ids = build(name), text(3, 40)
    rows = torch.tensor([2, 0, 0])
    with torch.no_grad():
        expected = model(torch.cat([ids[rows][:, :20], text(3, 20, seed=9)], dim=1), use_cache=False).logits[:, 20:]
        for change in ("reorder_cache", "batch_select_indices"):
            _, memory = read(model, ids[:, :20], [7])
            getattr(memory, change)(rows)
            found = [model(part, **cache_argument(memory)).logits for part in text(3, 20, seed=9).split(3, dim=1)]
            torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=5e-5, rtol=1e-4)
        _, memory = read(model, ids[:1, :20], [])
        memory.batch_repeat_interleave(3)
        found = [model(part, **cache_argument(memory)).logits for part in text(3, 20, seed=9).split(1, dim=1)]
        repeated = torch.cat([ids[:1, :20].expand(3, -1), text(3, 20, seed=9)], dim=1)
        expected = model(repeated, use_cache=False).logits[:, 20:]
        torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=5e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(memories, st.integers(1, 3), st.integers(0, 30), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_tokens_taken_back_leave_no_trace(
    name: str, rows: int, before: int, calls: list[int], data: st.DataObject
) -> None:
    model, ids = build(name), text(rows, before + sum(calls) + 1)
    memory = CompressedCache(model.config)
    end = before
    with torch.no_grad():
        if before:
            model(ids[:, :before], **cache_argument(memory))
        memory.activate_past_recording()
        for new in [n for n in calls if n]:
            model(ids[:, end : end + new], **cache_argument(memory))
            end += new
        if end == 0:
            return
        back = data.draw(st.integers(0, end - before))
        if data.draw(st.booleans()):  # a reordering between reading and taking back
            memory.reorder_cache(torch.arange(rows).flip(0))
            ids = ids.flip(0)
        memory.crop(-back)
        assert memory.get_seq_length() == end - back
        other = text(rows, 15, seed=7)
        found = [model(part, **cache_argument(memory)).logits for part in other.split(4, dim=1)]
        memory.crop(0)
        fresh, twin = read(model, torch.cat([ids[:, : end - back], other], dim=1), [])
        torch.testing.assert_close(torch.cat(found, dim=1), fresh[:, end - back :], atol=5e-5, rtol=1e-4)
        for layer, expected in zip(memory.layers, twin.layers, strict=True):
            counts = layer.pages.counts_BG
            assert torch.equal(counts, expected.pages.counts_BG)
            filled = torch.arange(layer.keys.shape[2]) < counts[..., None]  # the rest is padding
            filled = filled.repeat_interleave(layer.keys.shape[1] // counts.shape[1], dim=1)
            torch.testing.assert_close(layer.keys[filled], expected.keys[filled], atol=5e-5, rtol=1e-4)
            kept, wanted = layer._states(), expected._states()
            assert {key: part.shape for key, part in kept.items()} == {key: part.shape for key, part in wanted.items()}


def test_only_what_was_recorded_can_be_taken_back() -> None:
    model, ids = build("hash by head"), text(1, 20)
    _, memory = read(model, ids, [])
    assert not memory.is_croppable
    memory.activate_past_recording()
    assert memory.is_croppable
    model(text(1, 4, seed=1), **cache_argument(memory))
    for tokens in (-5, 3):
        with pytest.raises(ValueError, match="4 tokens can be taken back"):
            memory.crop(tokens)
    assert memory.get_seq_length() == 24
    memory.crop(-4)
    assert memory.get_seq_length() == 20


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_assisted_generation_equals_plain(name: str) -> None:
    # Token 0 is padding, which transformers masks in what it hands to an assistant.
    model, ids = build(name), text(1, 19).clamp(min=1)
    how = {"max_new_tokens": 14, "eos_token_id": None, "do_sample": False, "suppress_tokens": [0]}
    how["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **how)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **how), expected)
    assistant = build("hash" if name != "hash" else "overlap")
    assistant.generation_config.suppress_tokens = [0]
    assert torch.equal(model.generate(ids, assistant_model=assistant, **how), expected)


@pytest.mark.parametrize("name", sorted(MEMORIES))
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_generate_with_the_memory_equals_without(name: str, how: dict[str, Any]) -> None:
    model, ids = build(name), text(2, 19)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        mask = torch.ones_like(ids)
        settings = {"max_new_tokens": 12, "use_cache": use_cache, "eos_token_id": None, **how}
        found.append(model.generate(ids, attention_mask=mask, **settings))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["hash by head", "staggered heads", "fixed, both", "overlap, both"])
def test_save_and_load(name: str, tmp_path) -> None:
    model, ids = build(name), text(2, 30)
    model.save_pretrained(tmp_path)
    back = CompressedQwen3ForCausalLM.from_pretrained(tmp_path).eval()
    assert (back.config.count_bias, back.config.sink_tokens) == (model.config.count_bias, model.config.sink_tokens)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, back(ids).logits)


def test_staggered_grids_put_no_token_at_every_boundary() -> None:
    ids = text(1, 48)
    for name in ("staggered heads", "staggered layers"):
        rules = rules_of(build(name).config)
        edges = {
            rule: {end - 1 for _, end, _ in closed_chunks(rule, ids[0], torch.empty(48, 1))}
            for groups in rules
            for rule in groups
        }
        assert len(edges) == 2
        assert not set.intersection(*edges.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), min_size=4, max_size=4), min_size=1, max_size=12), st.integers(1, 5))
def test_pages_hold_what_lists_would(steps: list[list[int]], page: int) -> None:
    """Two rows, two groups of one head each; every step appends so many entries to each of the four."""
    paged, lists = PagedEntries(page), [[] for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    for number, step in enumerate(steps):
        counts = torch.tensor(step).view(2, 2)
        most = int(counts.max())
        keys = torch.randn(2, 2, most, 3, generator=generator)
        filled = torch.arange(most) < counts[..., None]
        for place in range(4):
            lists[place] += list(keys[place // 2, place % 2, : step[place]])
        paged.append(keys, -keys, filled)
        check(*paged.view(), lists)
        check_products(paged, generator)
        if number % 4 == 1:
            rows = torch.tensor([1, 1] if number % 8 == 1 else [1, 0])
            paged.select(rows)
            lists = [list(lists[2 * int(row) + group]) for row in rows for group in range(2)]
            check(*paged.view(), lists)
        if number % 4 == 3:
            shorter = [len(held) // 2 for held in lists]
            paged.truncate(torch.tensor(shorter).view(2, 2))
            lists = [held[:count] for held, count in zip(lists, shorter, strict=True)]
            check(*paged.view(), lists)
    assert paged.counts_BG.flatten().tolist() == [len(held) for held in lists]


def check(keys: torch.Tensor, values: torch.Tensor, lists: list[list[torch.Tensor]]) -> None:
    assert keys.shape[2] == values.shape[2] == max(len(held) for held in lists)
    for place, held in enumerate(lists):
        if held:
            expected = torch.stack(held)
            assert torch.equal(keys[place // 2, place % 2, : len(held)], expected)
            assert torch.equal(values[place // 2, place % 2, : len(held)], -expected)


def check_products(paged: PagedEntries, generator: torch.Generator) -> None:
    """Products where entries lie are those with gathered entries; shared pages are refused."""
    query = torch.randn(2, 2, 3, 3, generator=generator)
    if paged.shared:
        with pytest.raises(ValueError, match="no one owner"):
            paged._owners_of_pages()
        return
    keys, values = paged.view()
    filled = torch.arange(paged.longest) < paged.counts_BG[..., None]
    found = paged.products(query).masked_fill(~filled[:, :, None], 0)
    expected = (query @ keys.transpose(2, 3)).masked_fill(~filled[:, :, None], 0)
    torch.testing.assert_close(found, expected)
    if paged.longest:
        torch.testing.assert_close(paged.mixed(found), expected @ values)


def test_growing_pages_leaves_old_ones_where_they_are() -> None:
    paged = PagedEntries(4)
    one = torch.randn(1, 1, 1, 8)
    paged.append(one, one, torch.ones(1, 1, 1, dtype=torch.bool))
    first = paged._slabs[0][0].data_ptr()
    for _ in range(100):
        paged.append(one, one, torch.ones(1, 1, 1, dtype=torch.bool))
    assert paged._slabs[0][0].data_ptr() == first
    assert paged.pages == 26
    with pytest.raises(ValueError, match="more entries than it has"):
        paged.truncate(torch.tensor([[102]]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_rule": "surprise"}, "chunk_rule"),
        ({**FIXED, **DYNAMIC}, "places its own chunks"),
        ({**DYNAMIC, "chunk_groups": 3}, "chunk_groups=3"),
        ({**DYNAMIC, "chunk_radius": 7}, "chunk_radius=7"),
        ({**DYNAMIC, "chunk_score": "ranks"}, "chunk_ranks"),
        ({**DYNAMIC, "slot_parameters": "series"}, "fixed grid"),
        ({**DYNAMIC, "grid_shift": "heads"}, "grid_shift"),
        ({**FIXED, "grid_shift": "heads"}, "chunk_groups"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CompressedQwen3Config(num_key_value_heads=4, **change)


def test_embeddings_alone_cannot_be_cut_by_token_ids() -> None:
    model = build("hash")
    with pytest.raises(ValueError, match="give input_ids"):
        model(inputs_embeds=torch.randn(1, 5, 16))


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_packed_and_padded_execution_agree_forward_and_backward(name: str) -> None:
    ids = text(3, 40)
    found = []
    for packed in (True, False):
        model = build(name)
        for layer in model.model.layers:
            layer.self_attn.compressor.packed = packed
        logits = model(ids, use_cache=False).logits
        (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
        found.append((logits.detach(), {key: p.grad for key, p in model.named_parameters()}))
    (logits, gradients), (others, other_gradients) = found
    torch.testing.assert_close(logits, others, atol=5e-5, rtol=1e-4)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, other_gradients[key], atol=2e-3, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", [*sorted(MEMORIES), "full"])
def test_flex_attention_agrees_with_the_dense_mask(name: str) -> None:
    """Uncompiled, so that this is quick; the masks are those of compiled runs."""
    model, ids = build(name), text(2, 40)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(model(ids, logits_to_keep=2).logits, expected[:, -2:], atol=5e-5, rtol=1e-4)
        logits, _ = read(model, ids, [9, 10, 23])
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-4)


def test_a_router_learns_where_to_cut_and_how_often() -> None:
    """The ratio loss pulls the mean length to its target, and the language model's loss reaches the router."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build("router").train()
        router = model.model.routers[0]
        loss = model(text(2, 30), labels=text(2, 30), use_cache=False).loss
        (gradient,) = torch.autograd.grad(loss, [router.query.weight])
        assert gradient.abs().max() > 0
        optimiser = torch.optim.Adam(model.model.routers.parameters(), lr=3e-3)
        ids = text(8, 200, seed=5)

        def mean_tokens() -> float:
            with torch.no_grad():
                return 1 / float((router(model.model.embed_tokens(ids)) > 0.5).float().mean())

        assert mean_tokens() < 3
        for _ in range(300):
            optimiser.zero_grad()
            model.model.router_loss(ids).backward()
            optimiser.step()
        assert 4.5 < mean_tokens() < 12


def test_a_copied_model_follows_its_own_router() -> None:
    model, ids = build("router"), text(1, 30)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        twin = copy.deepcopy(model)
        for parameter in twin.model.routers.parameters():
            parameter.normal_()
        assert torch.equal(model(ids, use_cache=False).logits, before)
        assert not torch.equal(twin(ids, use_cache=False).logits, before)
