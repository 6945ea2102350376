"""Executors equal the dense mask, for any plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isophase.prefill import attend_blocked, attend_dense, attend_reference, full_plan
from isophase.prefill.execution.flex import attend_flex

CASES = {
    "kv_heads": st.integers(1, 3), "group": st.integers(1, 3), "width": st.sampled_from([8, 20, 64, 80]),
    "queries": st.integers(1, 300), "past": st.integers(0, 150),
    "query_tokens": st.sampled_from([16, 24, 64, 100, 128]),
    "key_tokens": st.sampled_from([1, 7, 16]), "share": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    "columns": st.integers(0, 40), "window": st.none() | st.integers(1, 200), "seed": st.integers(0, 2**20),
}  # fmt: skip


def make(random_plan, kv_heads, group, width, queries, past, seed, **plan):
    generator = torch.Generator().manual_seed(seed)
    tokens = past + queries
    query = torch.randn(kv_heads * group, queries, width, generator=generator)
    key, value = (torch.randn(kv_heads, tokens, width, generator=generator) for _ in range(2))
    columns = min(plan.pop("columns"), tokens)
    made = random_plan(generator, heads=kv_heads * group, queries=queries, past=past, columns=columns, **plan)
    return query, key, value, made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**CASES)
def test_blocked_equals_the_mask(random_plan, **case) -> None:
    query, key, value, plan = make(random_plan, **case)
    expected = attend_reference(query, key, value, plan, scaling=0.3)
    torch.testing.assert_close(attend_blocked(query, key, value, plan, scaling=0.3), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**CASES)
def test_flex_equals_the_mask(random_plan, **case) -> None:
    query, key, value, plan = make(random_plan, **case)
    expected = attend_reference(query, key, value, plan)
    torch.testing.assert_close(
        attend_flex(query, key, value, plan, compiled=False), expected, atol=1e-5, rtol=1e-5
    )  # fmt: skip


@pytest.mark.parametrize(("queries", "past", "window"), [(256, 0, None), (200, 77, None), (300, 0, 90)])
def test_compiled_flex_skips_tiles_and_equals_the_mask(random_plan, queries, past, window) -> None:
    case = {"kv_heads": 1, "group": 2, "width": 16, "query_tokens": 64, "key_tokens": 16, "share": 0.1}
    query, key, value, plan = make(random_plan, queries=queries, past=past, columns=9, window=window, seed=3, **case)
    try:
        found = attend_flex(query, key, value, plan)
    except Exception as error:  # what a compiler that is not there raises differs by version
        pytest.skip(f"FlexAttention does not compile here: {type(error).__name__}")
    torch.testing.assert_close(found, attend_reference(query, key, value, plan), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("past", [0, 1, 130])
@pytest.mark.parametrize("window", [None, 1, 50, 128])
def test_the_full_plan_is_dense_attention(past, window) -> None:
    query, key, value = torch.randn(4, 300, 16), torch.randn(2, 300 + past, 16), torch.randn(2, 300 + past, 16)
    plan = full_plan(4, 300 + past, first_query=past, query_tokens=64, window_tokens=window)
    age = torch.arange(past, 300 + past)[:, None] - torch.arange(300 + past)
    seen = (age >= 0) & (age < window) if window else age >= 0
    keys, values = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    torch.testing.assert_close(attend_blocked(query, key, value, plan), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plan.density(), torch.ones(4, dtype=torch.float64))
    if window is None:
        torch.testing.assert_close(attend_dense(query, key, value), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_and_strided_tensors(random_plan) -> None:
    case = {"kv_heads": 2, "group": 2, "width": 64, "query_tokens": 64, "key_tokens": 16, "share": 0.2, "columns": 9}
    query, key, value, plan = make(random_plan, queries=250, past=30, window=None, seed=1, **case)
    expected = attend_reference(query, key, value, plan)
    # As models hand them over: heads inside tokens.
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    torch.testing.assert_close(attend_blocked(*strided, plan), expected, atol=1e-5, rtol=1e-5)
    half = attend_blocked(query.bfloat16(), key.bfloat16(), value.bfloat16(), plan)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=3e-2, rtol=3e-2)


def test_large_logits_do_not_overflow(random_plan) -> None:
    case = {"kv_heads": 1, "group": 1, "width": 16, "query_tokens": 32, "key_tokens": 8, "share": 0.2, "columns": 9}
    query, key, value, plan = make(random_plan, queries=200, past=0, window=40, seed=5, **case)
    found = attend_blocked(query * 100, key * 10, value, plan)
    torch.testing.assert_close(found, attend_reference(query * 100, key * 10, value, plan), atol=1e-4, rtol=1e-4)
