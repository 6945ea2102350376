"""Exact attention of sampled queries, and what a choice keeps of it, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.prefill import Geometry, Sampling, sample_head
from isophase.prefill import rows as rows_module
from isophase.prefill.rows import Rows, attention_rows
from isophase.prefill.sample import dependable_recall


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("kept_numbers", "numbers"), [(2**21, 2**19), (10, 400)])
def test_rows_are_the_same_in_any_chunks_and_twice(monkeypatch, keep, kept_numbers, numbers) -> None:
    monkeypatch.setattr(rows_module, "_KEPT_NUMBERS", kept_numbers)
    monkeypatch.setattr(rows_module, "_NUMBERS", numbers)
    query, key, position = torch.randn(40, 8), torch.randn(90, 8), torch.arange(50).add(40)[:40]
    logits = (query @ key.T * 0.3).masked_fill(torch.arange(90) > position[:, None], -torch.inf)
    rows = Rows(query, key, position, 0.3, keep=keep)
    for _ in range(2):
        seen = []
        for at, rows_RW in rows:
            torch.testing.assert_close(rows_RW, logits[at, : rows_RW.shape[1]].softmax(-1))
            assert rows_RW.shape[1] == int(position[at][-1]) + 1
            seen += position[at].tolist()
        assert seen == position.tolist()


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(40, 400), part=st.floats(0, 0.8), key_tokens=st.sampled_from([16, 32]),
    seed=st.integers(0, 1000), data=st.data(),
)  # fmt: skip
def test_all_levels_at_once_keep_what_each_one_keeps(tokens, part, key_tokens, seed, data) -> None:
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry(tokens=tokens, first_query=int(part * tokens), query_tokens=32, key_tokens=key_tokens)
    query = torch.randn(geometry.queries, 16, generator=generator)
    key = torch.randn(tokens, 16, generator=generator)
    sample = sample_head(query, key, geometry, Sampling(last=4, spread=9, verify=11), scaling=1.0)
    levels = data.draw(st.integers(1, 9))
    block_VN = torch.randint(levels + 1, sample.block_VN.shape, generator=generator)
    column_C = torch.randint(levels + 1, sample.columns_C.shape, generator=generator).sort().values
    both = sample.kept_by_level(block_VN, column_C, levels)
    blocks = sample.kept_by_level(block_VN, None, levels)
    rows_VL = attention_rows(query[sample.verify_V - geometry.first_query], key, sample.verify_V, 1.0)
    for level in range(levels):
        read_VN, columns = block_VN <= level, int((column_C <= level).sum())
        torch.testing.assert_close(both[:, level], sample.kept(read_VN, columns), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(blocks[:, level], sample.kept(read_VN, 0), rtol=1e-5, atol=1e-5)
        for row, position in enumerate(sample.verify_V.tolist()):
            start = position - (position - geometry.first_query) % 32
            named = set(sample.columns_C[:columns].tolist())
            read = [x >= start or bool(read_VN[row, x // key_tokens]) or x in named for x in range(position + 1)]
            kept = float(rows_VL[row, : position + 1][torch.tensor(read)].sum())
            assert float(both[row, level]) == pytest.approx(kept, abs=1e-4)


def test_few_queries_that_lose_much_count_more_than_many_that_lose_little() -> None:
    even, one = torch.full((100,), 0.97), torch.ones(100)
    one[7] = 0.0
    assert float(one.mean()) > float(even.mean())
    assert float(dependable_recall(one)) < float(dependable_recall(even)) == pytest.approx(0.97)
    assert float(dependable_recall(torch.ones(3))) == 1.0
    assert dependable_recall(torch.rand(5, 9)).shape == (5,)
