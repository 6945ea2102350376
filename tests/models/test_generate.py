"""`generate` with a memory, without one, and from where another call stopped."""

from __future__ import annotations

import pytest
import torch

from isophase.models.compat import cache_argument
from isophase.models.memory import CompressedCache

GRIDS = [(8, 8), (8, 4), (8, 6), (4, 4), (None, None)]
GREEDY = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("grid", GRIDS)
def test_greedy_with_memory_equals_without(make_model, draw_ids, grid) -> None:
    model = make_model(*grid)
    for tokens in (1, 7, 8, 11):
        ids = draw_ids(2, tokens)
        with_memory = model.generate(ids, use_cache=True, **GREEDY)
        assert with_memory.shape == (2, tokens + 14)
        assert torch.equal(with_memory, model.generate(ids, use_cache=False, **GREEDY))


@pytest.mark.parametrize("grid", GRIDS)
def test_greedy_is_the_most_likely_token_each_time(make_model, draw_ids, grid) -> None:
    model = make_model(*grid)
    out = model.generate(draw_ids(1, 9), **GREEDY)
    with torch.no_grad():
        logits = model(out[:, :-1], use_cache=False).logits
    assert torch.equal(logits[:, 8:].argmax(-1), out[:, 9:])


@pytest.mark.parametrize("grid", GRIDS)
def test_beam_search_with_memory_equals_without(make_model, draw_ids, grid) -> None:
    model, ids = make_model(*grid), draw_ids(2, 10)
    beams = {**GREEDY, "num_beams": 4, "num_return_sequences": 2}
    with_memory = model.generate(ids, use_cache=True, **beams)
    assert torch.equal(with_memory, model.generate(ids, use_cache=False, **beams))
    # The beams matter: greedy search finds something else in at least one row.
    assert not torch.equal(with_memory[::2], model.generate(ids, **GREEDY))


@pytest.mark.parametrize("grid", [(8, 8), (8, 4)])
def test_continuing_a_memory(make_model, draw_ids, grid) -> None:
    model, ids = make_model(*grid), draw_ids(1, 10)
    memory = CompressedCache(model.config)
    first = model.generate(ids, **cache_argument(memory), **GREEDY)
    assert memory.get_seq_length() == first.shape[1] - 1  # the last token has not been read
    question = torch.cat([first, draw_ids(1, 5, seed=2)], dim=1)
    # A random model may write the padding token; without a mask `generate` would take it for padding.
    mask = torch.ones_like(question)
    continued = model.generate(question, attention_mask=mask, **cache_argument(memory), **GREEDY)
    assert torch.equal(continued, model.generate(question, attention_mask=mask, use_cache=False, **GREEDY))


def test_sampling_runs_and_follows_the_seed(make_model, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(2, 10)
    outs = []
    for use_memory in (True, False):
        torch.manual_seed(3)
        outs.append(model.generate(ids, do_sample=True, max_new_tokens=8, eos_token_id=None, use_cache=use_memory))
    assert torch.equal(*outs)


def test_rows_that_end_early(make_model, draw_ids) -> None:
    model, ids = make_model(8, 4), draw_ids(3, 10)
    free = model.generate(ids, **GREEDY)
    ending = int(free[0, 12])
    settings = {**GREEDY, "eos_token_id": ending}
    out = model.generate(ids, use_cache=True, **settings)
    assert torch.equal(out, model.generate(ids, use_cache=False, **settings))
    assert int(out[0, 12]) == ending
    assert not out[0, 13:].any()


def test_a_static_cache_is_refused(make_model, draw_ids) -> None:
    with pytest.raises(ValueError, match=r"cache_implementation='static' cannot hold .*leave it unset"):
        make_model(8, 4).generate(draw_ids(1, 5), cache_implementation="static", **GREEDY)
