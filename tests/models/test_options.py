"""Sinks and the count bias: what they mean, beside what `test_chunks` holds for every memory."""

from __future__ import annotations

import copy
from math import log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.models.attention import FEWEST_SEPARATE
from isophase.models.bundled import bundled_folder, bundled_names
from isophase.models.chunks import ChunkReader
from isophase.models.config import CompressedQwen3Config
from isophase.models.masks import dense_mask
from isophase.models.memory import CompressedCache
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

TIGHT = {"atol": 2e-5, "rtol": 1e-4}
BOTH: dict[str, Any] = {"count_bias": True, "sink_tokens": 4}
CONTENT: dict[str, Any] = {"chunk_rule": "local_maximum", "chunk_radius": 2, "chunk_max_tokens": 7, "chunk_groups": 2}
OPTIONS = [{"count_bias": True}, {"sink_tokens": 4}, BOTH]


def with_options(model: CompressedQwen3ForCausalLM, **options: Any) -> CompressedQwen3ForCausalLM:
    """The same weights with other options."""
    config = CompressedQwen3Config(**{**model.config.to_dict(), **options})
    twin = CompressedQwen3ForCausalLM(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@settings(max_examples=60, deadline=None)
@given(
    window=st.sampled_from([(8, 8), (8, 4), (6, 6), (2, 2), (None, None)]),
    local=st.integers(1, 9),
    tail=st.booleans(),
    sinks=st.integers(0, 12),
    past=st.integers(0, 40),
    new=st.integers(1, 12),
)
def test_every_sink_is_one_column_that_every_later_query_sees(window, local, tail, sinks, past, new) -> None:
    """In the window too, and however much was read before; other columns are as without sinks."""
    content = CONTENT if window[0] is None else {"local_memory": "tail" if tail else "window"}
    settings = {"compression_window": window[0], "compression_stride": window[1], "local_window": local, **content}
    reader, masks = None, []
    ids = torch.randint(0, 23, (2, past + new), generator=torch.Generator().manual_seed(past))
    for kept in (sinks, 0):
        config = CompressedQwen3Config(num_key_value_heads=2, sink_tokens=kept, **settings)
        reader = ChunkReader(config)
        state = reader.read(ids[:, :past], None, None)[1] if past else None
        (chunks, *_), _ = reader.read(ids[:, past:], None, state)
        positions = torch.arange(past, past + new)
        mask = dense_mask(config, chunks, past, positions, torch.float32) == 0
        first = max(0, past - config.exact_tokens + 1)
        columns = [*range(min(kept, first)), *range(first, past + new)]
        entries = chunks.close_BGE.shape[2]
        assert mask.shape[-1] == entries + len(columns)
        masks.append({"entries": mask[..., :entries], **{c: mask[..., entries + n] for n, c in enumerate(columns)}})
    with_sinks, without = masks
    assert torch.equal(with_sinks["entries"], without["entries"])
    for token in range(past + new):
        later = torch.arange(past, past + new) >= token
        if token < sinks:
            assert torch.equal(with_sinks[token], later.expand(with_sinks[token].shape))
        elif token in without:
            assert torch.equal(with_sinks[token], without[token])
        else:
            assert token not in with_sinks


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 60),
    cut=st.integers(1, 60),
    local=st.integers(1, 16),
    sinks=st.integers(0, 9),
    content=st.booleans(),
)
def test_sinks_are_stored_once(make_model, read, draw_ids, tokens, cut, local, sinks, content) -> None:
    """Exact keys and values are those of the newest tokens and of sinks before them, no more."""
    grid, settings = ((None, None), CONTENT) if content else ((8, 8), {})
    model = make_model(*grid, local=local, sink_tokens=sinks, **settings)
    _, memory = read(model, draw_ids(2, tokens), [cut] if cut < tokens else [])
    newest = min(model.config.exact_tokens - 1, tokens)
    for layer in memory.layers:
        stored = layer._states()
        assert stored["local_keys"].shape == stored["local_values"].shape == (2, 2, newest, 8)
        apart = min(sinks, tokens - newest)
        assert ("sink_keys" in stored) == ("sink_values" in stored) == (apart > 0)
        if apart:
            assert stored["sink_keys"].shape == stored["sink_values"].shape == (2, 2, apart, 8)
            assert stored["sink_keys"].untyped_storage().nbytes() == stored["sink_keys"].numel() * 4
        assert layer.get_seq_length() == tokens
    memory.reset()
    assert all(layer.stored_bytes() == 0 for layer in memory.layers)


def test_a_sink_is_read_through_any_distance(make_model, draw_ids) -> None:
    """With one layer and entries whose values are 0, a query far away depends on sinks and on what is near alone."""
    model = with_options(make_model(8, 8, local=2, layers=1), sink_tokens=3)
    with torch.no_grad():
        model.model.layers[0].self_attn.compressor.values.payload_WDC.zero_()
        model.model.layers[0].self_attn.compressor.keys.payload_WDC.zero_()
        ids = draw_ids(1, 60)
        before = model(ids).logits[0, -1]
        for at, heard in ((0, True), (2, True), (3, False), (40, False), (58, True)):
            changed = ids.clone()
            changed[0, at] = 2 + (changed[0, at] - 1) % 50
            assert torch.equal(model(changed).logits[0, -1], before) != heard


def test_the_bias_makes_an_entry_weigh_as_its_tokens(make_model, draw_ids) -> None:
    """Where all products are 0 every token counts once: through its entry, and again where it is exact too."""
    model = with_options(make_model(8, 4, local=3), **BOTH)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
        model.set_attn_implementation("eager")
        weights = model(draw_ids(2, 15), output_attentions=True).attentions[0]
    for query in range(15):
        entries = (query + 1) // 4
        exact = {*range(min(4, query + 1)), *range(max(0, query - 2), query + 1)}
        total = 4 * entries + len(exact)
        expected = [4 / total if e < entries else 0.0 for e in range(3)]
        expected += [1 / total if token in exact else 0.0 for token in range(15)]
        torch.testing.assert_close(weights[:, :, query], torch.tensor(expected).expand(2, 4, -1))


def test_bias_counts_own_tokens_in_every_call() -> None:
    """Of old entries and new ones, row by row and group by group, also after selecting rows."""
    config = CompressedQwen3Config(num_key_value_heads=2, count_bias=True, chunk_overlap=2, **CONTENT)
    reader = ChunkReader(config)
    ids = torch.randint(0, 23, (3, 50), generator=torch.Generator().manual_seed(2))
    (whole, *_), _ = reader.read(ids, None, None)
    (layout_one, layout_two), state = whole.layouts, None
    for first in range(0, 50, 7):
        if first == 21:
            state, ids = state.select(torch.tensor([2, 2, 0])), ids[[2, 2, 0]]
            (whole, *_), _ = reader.read(ids, None, None)
            layout_one, layout_two = whole.layouts
        (chunks, *_), state = reader.read(ids[:, first : first + 7], None, state)
        for group, layout in enumerate((layout_one, layout_two)):
            for row in range(3):
                closed = layout.close_BE[row] < first + 7
                found = chunks.bias_BGE[row, group][chunks.close_BGE[row, group] < first + 7]
                torch.testing.assert_close(found, layout.length_BE[row][closed].float().log())
    plain = ChunkReader(CompressedQwen3Config(num_key_value_heads=2, **CONTENT))
    (chunks, *_), state = plain.read(ids, None, None)
    assert chunks.bias_BGE is None
    assert all(tokens.numel() == 0 for tokens in state.tokens)


def test_on_a_fixed_grid_the_bias_is_log_of_the_stride() -> None:
    for shift, first in (("none", 6), ("layers", 3)):
        config = CompressedQwen3Config(
            compression_window=8, compression_stride=6, count_bias=True, grid_shift=shift, num_hidden_layers=2
        )
        layers, _ = ChunkReader(config).read(torch.zeros(2, 30, dtype=torch.long), None, None)
        found = layers[-1].bias_BGE
        # A shifted grid begins with a shorter chunk.
        expected = torch.tensor([log(first)] + [log(6)] * (found.shape[2] - 1))
        torch.testing.assert_close(found, expected.expand(found.shape))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("grid", [(8, 8), (8, 4), (None, None)])
def test_executions_agree(make_model, read, draw_ids, grid, options) -> None:
    """Eager, sdpa, FlexAttention, gathered, in place: past the length at which groups are called apart, too."""
    settings = CONTENT if grid[0] is None else {}
    model = with_options(make_model(*grid, **settings), **options)
    ids = draw_ids(2, FEWEST_SEPARATE + 20)
    expected, memory = read(model, ids, [])
    shared = copy.deepcopy(memory)
    shared.reorder_cache(torch.tensor([0, 0]))  # pages with two owners are gathered
    more = draw_ids(2, 9, seed=1)
    after, _ = read(model, more, [3, 4], memory)
    torch.testing.assert_close(read(model, more[:1].repeat(2, 1), [3, 4], shared)[0][0], after[0], **TIGHT)
    with torch.compiler.set_stance("force_eager"):
        for implementation in ("eager", "flex_attention"):
            model.set_attn_implementation(implementation)
            torch.testing.assert_close(read(model, ids)[0], expected, **TIGHT)
            found, memory = read(model, ids, [5, 70])
            torch.testing.assert_close(found, expected, **TIGHT)
            torch.testing.assert_close(read(model, more, [3, 4], memory)[0], after, **TIGHT)


@settings(max_examples=20, deadline=None)
@given(
    options=st.sampled_from(OPTIONS),
    content=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=3),
)
def test_right_padding_changes_no_row(make_model, draw_ids, options, content, lengths) -> None:
    grid, settings = ((None, None), CONTENT) if content else ((8, 4), {})
    model = make_model(*grid, **settings, **options)
    longest = max(lengths)
    ids = draw_ids(len(lengths), longest)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        padded = model(ids.masked_fill(~mask, 0), attention_mask=mask.long()).logits
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(padded[row, :length], alone, **TIGHT)


def test_bfloat16_within_its_precision(make_model, read, draw_ids) -> None:
    half, ids = with_options(make_model(8, 4), **BOTH), draw_ids(1, 30)
    half.to(torch.bfloat16)
    expected, _ = read(half, ids)
    scale = float(expected.float().abs().max())
    for cuts in ([7], [4, 9, 23], list(range(1, 30))):
        difference = (read(half, ids, cuts)[0].float() - expected.float()).abs().max()
        assert float(difference) < 0.05 * scale


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_add_no_parameter_and_change_the_answer(make_model, draw_ids, options) -> None:
    model, ids = make_model(8, 8), draw_ids(1, 30)
    twin = with_options(model, **options)
    with torch.no_grad():
        assert not torch.allclose(twin(ids).logits, model(ids).logits, atol=1e-3)
    twin.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in twin.parameters())


def test_without_compression_both_are_ignored(make_model, read, draw_ids) -> None:
    model, ids = make_model(None, None), draw_ids(2, 20)
    twin = with_options(model, **BOTH)
    assert torch.equal(read(twin, ids)[0], read(model, ids)[0])
    assert torch.equal(read(twin, ids, [7])[0], read(model, ids, [7])[0])


def test_bundled_models_have_neither() -> None:
    for name in bundled_names():
        config = CompressedQwen3Config.from_pretrained(bundled_folder(name))
        assert (config.count_bias, config.sink_tokens) == (False, 0)


def test_sinks_can_be_taken_back(make_model, read, draw_ids) -> None:
    """A crop into the sinks, recorded from the first token on."""
    model, ids = with_options(make_model(8, 8, local=1), **BOTH), draw_ids(2, 20)
    memory = CompressedCache(model.config)
    memory.activate_past_recording()
    read(model, ids, [], memory)
    memory.crop(-18)
    other = draw_ids(2, 20, seed=4)
    expected, _ = read(model, torch.cat([ids[:, :2], other], dim=1))
    torch.testing.assert_close(read(model, other, [1, 9], memory)[0], expected[:, 2:], **TIGHT)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"sink_tokens": -1}, "sink_tokens=-1 must be a whole number of tokens, at least 0"),
        ({"sink_tokens": 2.5}, "sink_tokens=2.5 must be a whole number"),
        ({"sink_tokens": True}, "sink_tokens=True must be a whole number"),
        ({"sink_tokens": None}, "sink_tokens=None must be a whole number"),
        ({"count_bias": 1}, "count_bias=1 must be true or false"),
        ({"count_bias": "yes"}, "count_bias='yes' must be true or false"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(setting, words) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        CompressedQwen3Config(compression_window=8, compression_stride=8, **setting)
    assert "\n" not in str(caught.value)
