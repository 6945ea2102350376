"""Samples, patterns, and the adaptive mode on prompts whose structure is known."""

from __future__ import annotations

import pytest
import torch

from isophase.errors import IsophaseError
from isophase.prefill import (
    Adaptive,
    AShape,
    BlockSparse,
    Dense,
    Geometry,
    Sampling,
    VerticalSlash,
    attention_rows,
    make_plan,
    parse_pattern,
    sample_head,
    write_pattern,
)

TOKENS, WIDTH = 2048, 32


@pytest.fixture
def prompt(planted):
    columns = torch.tensor([0, 3, 400, 777, 1200])
    return planted(TOKENS, columns=columns, distance=600, width=WIDTH), columns


def look(query, key, **sampling):
    return sample_head(query[0], key[0], Geometry(tokens=TOKENS), Sampling(**sampling), scaling=WIDTH**-0.5)


def true_recall(query, key, reads) -> float:
    """Attention kept, over every query."""
    position = torch.arange(TOKENS)
    rows = attention_rows(query[0], key[0], position, WIDTH**-0.5)
    plan = make_plan([reads], Geometry(tokens=TOKENS))
    return float((rows * plan.rows(0, position)).sum() / TOKENS)


def test_sampled_attention_is_attention() -> None:
    query, key = torch.randn(50, 16), torch.randn(50, 16)
    expected = (query @ key.T * 0.3).masked_fill(torch.ones(50, 50).triu(1).bool(), -torch.inf).softmax(-1)
    position = torch.tensor([0, 7, 49])
    torch.testing.assert_close(attention_rows(query[position], key, position, 0.3), expected[position])


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 200, 5000])
def test_sampled_places_rise_lie_inside_and_repeat(tokens) -> None:
    for first in {0, tokens // 2}:
        geometry = Geometry(tokens=tokens, first_query=first)
        fit, verify = Sampling(seed=4).positions(geometry)
        for places in (fit, verify):
            assert len(places) > 0
            assert int(places[0]) >= first
            assert int(places[-1]) < tokens
            assert (places.diff() > 0).all()
        assert fit[-1] == tokens - 1
        again = Sampling(seed=4).positions(geometry)
        assert all(torch.equal(a, b) for a, b in zip((fit, verify), again, strict=True))


def test_planted_columns_and_diagonals_are_found(prompt) -> None:
    (query, key, _), columns = prompt
    sample = look(query, key)
    assert set(columns.tolist()) == set(sample.columns_C[:5].tolist())
    # A query at slot r reads key p - 600: distances from 600 - 127 to 600 keys before the block.
    width = sample.geometry.key_tokens
    best = sample.slash_worth_U[100 // width + 1 :].topk(6).indices + 100 // width + 1
    assert all(600 - 128 - width < d * width <= 600 + width for d in best.tolist())


def test_the_adaptive_mode_reaches_its_target_and_reads_little(prompt) -> None:
    (query, key, _), _ = prompt
    for target in (0.8, 0.95):
        choice = Adaptive(target_recall=target).choose(look(query, key))
        assert choice.reads is not None
        assert choice.recall >= target
        assert true_recall(query, key, choice.reads) > target - 0.03
        assert choice.keys_per_query < TOKENS / 4


def test_reported_recall_is_that_of_every_query(prompt) -> None:
    (query, key, _), _ = prompt
    sample = look(query, key, verify=256)
    for pattern in (
        AShape(first_tokens=16, local_tokens=256), VerticalSlash(columns=5, slash_tokens=160),
        VerticalSlash(columns=0, slash_tokens=0), BlockSparse(windows=6), BlockSparse(windows=6, overlap=1),
    ):  # fmt: skip
        reads = pattern.choose(sample)
        found = float(sample.kept(reads.at(sample.block_V), len(reads.columns)).mean())
        assert found == pytest.approx(true_recall(query, key, reads), abs=0.05)


def test_flat_attention_is_read_densely() -> None:
    query, key = torch.zeros(1, TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH)
    choice = Adaptive(target_recall=0.99).choose(look(query, key))
    assert isinstance(choice.pattern, Dense)
    assert choice.reads is None


def test_keys_are_counted_as_the_plan_counts_them(prompt) -> None:
    (query, key, _), _ = prompt
    sample = look(query, key)
    for pattern in (AShape(), VerticalSlash(columns=0, slash_tokens=512), BlockSparse(windows=9)):
        reads = pattern.choose(sample)
        history = make_plan([reads], sample.geometry).history_HQ().double().mean()
        assert reads.keys_per_query() == pytest.approx(float(history), abs=sample.geometry.key_tokens)


def test_overlapping_windows_cover_what_an_edge_cuts() -> None:
    """Eight keys that the newest queries want, at every phase of 64."""
    generator = torch.Generator().manual_seed(2)
    direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    covered = {1: [], 2: []}
    for phase in range(0, 64, 3):
        key = torch.randn(TOKENS, WIDTH, generator=generator)
        at = 640 + phase
        key[at : at + 8] += 12 * direction
        query = 2 * direction + 0.3 * torch.randn(TOKENS, WIDTH, generator=generator)
        sample = sample_head(query, key, Geometry(tokens=TOKENS), Sampling(), scaling=WIDTH**-0.5)
        for overlap, found in covered.items():
            reads = BlockSparse(windows=2 * overlap, overlap=overlap).choose(sample)
            plan = make_plan([reads], sample.geometry)
            found.append(bool(plan.rows(0, torch.tensor([TOKENS - 1]))[0, at : at + 8].all()))
    assert sum(covered[2]) >= sum(covered[1])
    assert all(covered[2])


def test_patterns_as_text() -> None:
    for pattern in (Dense(), AShape(), VerticalSlash(columns=7, slash_tokens=0), BlockSparse(overlap=4)):
        assert parse_pattern(write_pattern(pattern)) == pattern
    assert parse_pattern(" vertical_slash ") == VerticalSlash()
    for text, message in {
        "tri_shape": "pattern 'tri_shape' is unknown. Give one of dense, a_shape, vertical_slash, block_sparse.",
        "a_shape(128)": "cannot read the pattern",
        "a_shape(": "cannot read the pattern",
        "a_shape(width=3)": "a_shape has no setting 'width'. It has first_tokens, local_tokens.",
        "a_shape(first_tokens='3')": "first_tokens of .* is '3'. Give a whole number.",
        "a_shape(first_tokens=0)": "first_tokens is 0; give 1 or more",
        "block_sparse(overlap=3)": "overlap is 3; give a divisor of the 64 tokens",
        "dense(x=1)": "dense has no setting 'x'",
    }.items():
        with pytest.raises(IsophaseError, match=message):
            parse_pattern(text)


@pytest.mark.parametrize("target", [0.0, 1.0, -1])
def test_targets_out_of_range(target) -> None:
    with pytest.raises(ValueError, match="give a share between 0 and 1"):
        Adaptive(target_recall=target)
