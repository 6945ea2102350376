"""What must hold of a compressed cache in use: batches, padding, parts, decoding, reuse, and nothing left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    Full,
    MergedChunks,
    SnapKV,
    StreamingLLM,
    VotedChunkKV,
    compress,
)
from isophase.models.compat import cache_argument, cache_of

BUDGET = 20
METHODS = {
    "full": Full(),
    "streaming": StreamingLLM(budget=BUDGET),
    "snapkv": SnapKV(budget=BUDGET, window_tokens=6),
    "chunkkv": ChunkKV(budget=BUDGET, window_tokens=6, chunk_tokens=5),
    "reuse": ChunkKV(budget=BUDGET, window_tokens=6, chunk_tokens=5, reuse_layers=2),
    "voted": VotedChunkKV(budget=BUDGET, window_tokens=6, chunk_tokens=5),
    "dynamic": DynamicChunkKV(budget=BUDGET, window_tokens=6),
    "merged": MergedChunks(budget=BUDGET, window_tokens=6, chunk_tokens=5),
    "ratio": ChunkKV(ratio=0.4, window_tokens=6),
    "decoding": SnapKV(budget=BUDGET, window_tokens=6, every_tokens=3),
    "heads": ChunkKV(budget=((BUDGET, 12),), window_tokens=6, chunk_tokens=5, reuse_layers=2),
    "heads-decoding": DynamicChunkKV(budget=((BUDGET, 12), (9, BUDGET)), window_tokens=6, every_tokens=3),
    "heads-merged": MergedChunks(budget=((12, BUDGET),), window_tokens=6, chunk_tokens=5),
}
every_method = pytest.mark.parametrize("name", METHODS)


def generate(model: Any, ids: torch.Tensor, cache: Any, tokens: int = 8, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, **cache_argument(cache), **kwargs
    )  # fmt: skip
    return out[:, ids.shape[1] :]


def read(model: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **cache_argument(cache), **kwargs).logits
    return logits


@every_method
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_depends_on_itself_only(name, attention, side, make_model, random_ids) -> None:
    """Rows of 60, 43 and 9 tokens, padded to 64; logits of the steps after compression."""
    model, lengths, total = make_model("llama", attention=attention), [60, 43, 9], 64
    batch = torch.zeros(3, total, dtype=torch.long)
    mask = torch.zeros_like(batch)
    rows = [random_ids(n, seed=n)[0] for n in lengths]
    for row, ids in enumerate(rows):
        where = slice(total - len(ids), total) if side == "left" else slice(0, len(ids))
        batch[row, where], mask[row, where] = ids, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = compress(model, METHODS[name])
    read(model, batch, cache, attention_mask=mask, position_ids=positions)
    new = random_ids(5, rows=3, seed=7)
    steps = []
    for step in range(5):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        place = torch.tensor([[n + step] for n in lengths])
        steps.append(read(model, new[:, step : step + 1], cache, attention_mask=mask, position_ids=place))
    for row, ids in enumerate(rows):
        alone = compress(model, METHODS[name])
        read(model, ids[None], alone)
        for step in range(5):
            want = read(model, new[row : row + 1, step : step + 1], alone)
            torch.testing.assert_close(steps[step][row : row + 1], want, atol=3e-5, rtol=1e-4)


@every_method
def test_generate_continues_as_a_manual_loop(name, make_model, random_ids) -> None:
    model, ids = make_model("qwen3"), random_ids(50)
    made = generate(model, ids, compress(model, METHODS[name]))
    cache, out, step = compress(model, METHODS[name]), [], ids
    for _ in range(8):
        step = read(model, step, cache)[:, -1:].argmax(-1)
        out.append(int(step))
    assert made[0].tolist() == out
    assert cache.get_seq_length() == 57


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("full", "ratio") and "heads" not in n])
def test_what_fits_the_budget_is_kept_exactly(name, make_model, random_ids) -> None:
    model, ids = make_model("llama"), random_ids(BUDGET - 1)
    cache, plain = compress(model, METHODS[name]), DynamicCache(config=model.config)
    assert torch.equal(read(model, ids, cache), read(model, ids, plain))
    assert torch.equal(cache.layers[1].keys, plain.layers[1].keys)
    assert torch.equal(read(model, random_ids(1), cache), read(model, random_ids(1), plain))
    assert torch.equal(
        generate(model, ids, compress(model, METHODS[name]), 1), generate(model, ids, DynamicCache(), 1)
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "phi", "mistral"])
def test_a_budget_above_the_length_is_the_full_cache(family, make_model, random_ids) -> None:
    model, ids = make_model(family, window=12 if family == "gemma3" else None), random_ids(50)
    plain = generate(model, ids, DynamicCache(config=model.config))
    for method in (ChunkKV(budget=60, reuse_layers=2), SnapKV(budget=60), DynamicChunkKV(budget=60), Full()):
        assert torch.equal(generate(model, ids, compress(model, method)), plain)


@every_method
def test_every_part_of_a_prompt_is_compressed(name, make_model, random_ids) -> None:
    model, ids = make_model("llama"), random_ids(120)
    cache = compress(model, METHODS[name])
    for first in range(0, 120, 40):
        read(model, ids[:, first : first + 40], cache)
        read_so_far = first + 40
        want = {"full": read_so_far, "ratio": int(0.4 * read_so_far)}.get(name, BUDGET)
        if name == "ratio" and first:
            want = min(want, int(0.4 * first) + 40)
        assert [k.positions_BKE.shape[2] for k in cache.what_was_kept()] == [want] * 2
    assert cache.get_seq_length() == 120
    kept = cache.what_was_kept()[0].positions_BKE
    assert (kept[..., -1] == 119).all()
    assert kept.max() == 119


def test_compression_while_decoding(make_model, random_ids) -> None:
    model = make_model("llama")
    cache = compress(model, SnapKV(budget=BUDGET, window_tokens=6, every_tokens=4))
    read(model, random_ids(50), cache)
    held = []
    for step in range(12):
        read(model, random_ids(1, seed=step), cache)
        held.append(cache.layers[0].keys.shape[2])
    assert held == [21, 22, 23, 20] * 3
    assert cache.get_seq_length() == 62
    assert cache.index_bytes() > 0


def test_decoding_votes_with_the_newest_queries(make_model, random_ids) -> None:
    """Compressing at every token, when nothing was dropped before, is what one shot keeps."""
    model, ids = make_model("llama"), random_ids(40)
    one = compress(model, SnapKV(budget=39, window_tokens=6))
    read(model, ids, one)
    steps = compress(model, SnapKV(budget=39, window_tokens=6, every_tokens=1))
    for n in range(40):
        read(model, ids[:, n : n + 1], steps)
    assert torch.equal(one.what_was_kept()[0].positions_BKE, steps.what_was_kept()[0].positions_BKE)


@every_method
def test_one_object_serves_many_texts(name, make_model, random_ids) -> None:
    model, first, second = make_model("llama"), random_ids(70, seed=1), random_ids(55, seed=2)
    cache = compress(model, METHODS[name])
    generate(model, first, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = generate(model, second, cache)
    assert torch.equal(again, generate(model, second, compress(model, METHODS[name])))


@every_method
def test_rows_can_be_reordered_repeated_and_selected(name, make_model, random_ids) -> None:
    model, ids, new = make_model("llama"), random_ids(50, rows=2), random_ids(2, rows=1, seed=9)
    alone = compress(model, METHODS[name])
    read(model, ids[1:], alone)
    want = read(model, new, alone)[0]
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), 3),
        (lambda c: c.batch_select_indices(torch.tensor([1])), 1),
        (lambda c: (c.batch_repeat_interleave(2), c.reorder_cache(torch.tensor([3, 0]))), 2),
    ):
        cache = compress(model, METHODS[name])
        read(model, ids, cache)
        change(cache)
        torch.testing.assert_close(read(model, new.expand(rows, -1), cache)[0], want, atol=2e-5, rtol=1e-4)


def test_beam_search_runs(make_model, random_ids) -> None:
    model = make_model("llama")
    out = generate(model, random_ids(50), compress(model, METHODS["chunkkv"]), num_beams=3)
    assert out.shape == (1, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_method
def test_precisions(name, dtype, make_model, random_ids) -> None:
    model = make_model("llama", dtype=dtype)
    cache = compress(model, METHODS[name])
    assert torch.isfinite(read(model, random_ids(60), cache)).all()
    assert torch.isfinite(read(model, random_ids(1), cache)).all()
    assert all(part.keys.dtype == dtype for _, part in cache.layers[0].parts())


def test_a_grid_moves_with_the_text_and_content_does_not(make_model, random_ids) -> None:
    """Chunks by content hold the same tokens wherever the text stands; their kept places move with it."""
    model, ids = make_model("llama", layers=2), random_ids(90)
    cache = compress(model, METHODS["dynamic"])
    cache.tokens.pending_BT = None
    read(model, ids, cache)
    chunks = cache.tokens.chunk_BL(90)
    assert chunks is not None
    moved = compress(model, METHODS["dynamic"])
    read(model, torch.cat([random_ids(7, seed=3), ids], dim=1), moved)
    moved_chunks = moved.tokens.chunk_BL(97)
    assert moved_chunks is not None
    starts, moved_starts = (c.diff(dim=1).bool()[0].nonzero()[:, 0].tolist() for c in (chunks, moved_chunks))
    inside = [s for s in starts if 5 <= s < 80]
    assert inside == [s - 7 for s in moved_starts if 12 <= s < 87]


class BoomError(Exception):
    pass


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@every_method
def test_nothing_is_left_on_the_model(name, make_model, random_ids) -> None:
    model = make_model("llama")
    functions = {n: m.forward for n, m in model.named_modules()}
    cache = compress(model, METHODS[name])
    generate(model, random_ids(40), cache)
    assert model.config._attn_implementation == "sdpa"
    assert hooks_of(model) == (name in ("dynamic", "heads-decoding"))
    with cache:
        pass
    assert hooks_of(model) == 0
    other = compress(model, METHODS[name])
    del other
    gc.collect()
    assert hooks_of(model) == 0
    assert {n: m.forward for n, m in model.named_modules()} == functions


@every_method
def test_nothing_is_left_after_an_exception(name, make_model, random_ids, monkeypatch) -> None:
    model, ids = make_model("llama"), random_ids(40)
    plain = generate(model, ids, DynamicCache())

    def fail(*args: object, **kwargs: object) -> None:
        raise BoomError

    with monkeypatch.context() as patch:
        patch.setattr("isophase.cache.runtime.layers.CompressedLayer.attended", fail)
        if name == "full":
            patch.setattr("isophase.cache.runtime.layers.CompressedLayer.update", fail)
        with pytest.raises(BoomError), compress(model, METHODS[name]) as cache:
            read(model, ids, cache)
    assert model.config._attn_implementation == "sdpa"
    assert hooks_of(model) == 0
    assert torch.equal(generate(model, ids, DynamicCache()), plain)
    assert generate(model, ids, compress(model, METHODS[name])).shape == (1, 8)


def test_two_caches_of_one_model_do_not_meet(make_model, random_ids) -> None:
    model, first, second = make_model("llama"), random_ids(60, seed=1), random_ids(60, seed=2)
    names = ("dynamic", "dynamic", "snapkv")
    texts = (first, second, first)
    alone = [generate(model, t, compress(model, METHODS[n])) for n, t in zip(names, texts, strict=True)]
    caches = [compress(model, METHODS[n]) for n in names]
    steps, out = list(texts), [[], [], []]
    for _ in range(8):
        for n, cache in enumerate(caches):
            steps[n] = read(model, steps[n], cache)[:, -1:].argmax(-1)
            out[n].append(int(steps[n]))
    assert [a[0].tolist() for a in alone] == out


def test_the_model_returns_the_cache(make_model, random_ids) -> None:
    model = make_model("llama")
    cache = compress(model, METHODS["chunkkv"])
    with torch.no_grad():
        assert cache_of(model(random_ids(40), **cache_argument(cache))) is cache
