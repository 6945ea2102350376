"""The plan: what it means, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isophase.prefill import Plan


def tiny(**changes) -> Plan:
    made = {
        "blocks_HQN": torch.tensor([[[False] * 5, [True] + [False] * 4, [False, True, False, False, False]]]),
        "columns": (torch.tensor([2, 5]),), "tokens": 10, "first_query": 0, "query_tokens": 4, "key_tokens": 2,
    }  # fmt: skip
    return Plan(**{**made, **changes})


def test_a_plan_written_out() -> None:
    expected = [
        "1.........", "11........", "111.......", "1111......",
        "111.1.....", "111.11....", "111.111...", "111.1111..",
        "..11.1..1.", "..11.1..11",
    ]  # fmt: skip
    rows = ["".join("1" if seen else "." for seen in row) for row in tiny().dense_mask()[0].tolist()]
    assert rows == expected
    rows = ["".join("1" if seen else "." for seen in row) for row in tiny(window_tokens=4).dense_mask()[0].tolist()]
    assert rows[4:] == [".11.1.....", "..1.11....", "....111...", "....1111..", ".....1..1.", "........11"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    queries=st.integers(1, 120), past=st.integers(0, 60), query_tokens=st.sampled_from([8, 20, 32]),
    key_tokens=st.sampled_from([1, 3, 8]), columns=st.integers(0, 20), window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_density_counts_the_mask(random_plan, queries, past, columns, window, seed, **plan) -> None:
    made = random_plan(
        torch.Generator().manual_seed(seed), heads=2, queries=queries, past=past, share=0.3,
        columns=min(columns, queries + past), window=window, **plan,
    )  # fmt: skip
    mask = made.dense_mask()
    position = torch.arange(past, past + queries)
    dense = (position + 1).clamp(max=window).sum() if window else (position + 1).sum()
    torch.testing.assert_close(made.density(), mask.sum((1, 2)).double() / dense)
    assert mask.any(-1).all(), "every query reads itself"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_query": 10}, "first query 10 is not one of 0..9"),
        ({"key_tokens": 5}, "blocks of 5 keys for 4 queries"),
        ({"tokens": 12}, "they must be"),
        ({"columns": ()}, "columns of 0 heads for 1 heads"),
        ({"columns": (torch.tensor([5, 2]),)}, "columns must rise and lie in 0..9"),
        ({"columns": (torch.tensor([5, 10]),)}, "columns must rise and lie in 0..9"),
        ({"window_tokens": 0}, "a window of 0 tokens"),
    ],
)
def test_what_is_no_plan(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)
