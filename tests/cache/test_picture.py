"""The picture of what was kept."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from isophase.cache import StreamingLLM, compress, draw_kept
from isophase.models.compat import cache_argument


def test_columns_are_the_kept_tokens(make_model, random_ids) -> None:
    model = make_model("llama")
    cache = compress(model, StreamingLLM(budget=10))
    with torch.no_grad():
        model(random_ids(60), **cache_argument(cache))
    text = draw_kept(cache.what_was_kept(), cache.get_seq_length(), title="a < b")
    root = ElementTree.fromstring(text)
    marks = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill-opacity")]
    assert len(marks) == 2 * 2 * 10  # two layers of two heads
    places = sorted({float(r.get("x", "")) for r in marks})
    step = (960 - 64) / 60
    assert [round((x - 64) / step) for x in places] == [0, 1, 2, 3, *range(54, 60)]
    assert {r.get("fill-opacity") for r in marks} == {"1.00"}


def test_nothing_to_draw(make_model, random_ids) -> None:
    model = make_model("llama")
    cache = compress(model, StreamingLLM(budget=10))
    with pytest.raises(ValueError, match="read nothing"):
        draw_kept(cache.what_was_kept(), 0)
    with torch.no_grad():
        model(random_ids(60), **cache_argument(cache))
    with pytest.raises(ValueError, match=r"row 1 is not one of 0\.\.0"):
        draw_kept(cache.what_was_kept(), 60, row=1)
