"""Rules: streaming equals one shot, starts are what the definition says, and content moves them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.chunking.layout import NEVER, ChunkLayout
from isophase.chunking.rules import (
    ChunkRule,
    FixedStride,
    LocalMaximum,
    NeighbourCosine,
    Threshold,
    TokenHash,
    TokenRanks,
)

VOCABULARY = 12


@st.composite
def rules(draw: st.DrawFn) -> ChunkRule:
    radius = draw(st.integers(1, 5))
    longest = draw(st.integers(radius + 1, 14))
    score = draw(
        st.sampled_from(
            [
                TokenHash(salt=draw(st.integers(0, 5))),
                TokenRanks(ranks=(0, 0, 3, 0, 1), salt=1),
                TokenRanks(ranks=(0, 0, 3, 0, 1), break_ties=False),
                NeighbourCosine(),
            ]
        )
    )
    stride = draw(st.integers(1, 9))
    fixed = FixedStride(stride_tokens=stride, shift_tokens=draw(st.integers(0, stride - 1)))
    maximum = LocalMaximum(score=score, radius_tokens=radius, max_tokens=longest)
    above = Threshold(score=NeighbourCosine(), threshold=draw(st.sampled_from([0.3, 0.5, 0.8])), max_tokens=longest)
    return draw(st.sampled_from([fixed, maximum, above]))


texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60), min_size=1, max_size=1)
EMBEDDINGS = torch.randn(VOCABULARY, 6, generator=torch.Generator().manual_seed(0))


def starts(rule: ChunkRule, ids: torch.Tensor) -> list[list[int]]:
    """Starts by row, token 0 left out, of a text that goes on after its end with the same last token."""
    more = max(rule.lookahead_tokens, 0)
    longer = torch.cat([ids, ids[:, -1:].expand(-1, more)], dim=1)
    flags, _ = rule.starts(longer, EMBEDDINGS[longer % VOCABULARY])
    return [[int(t) - rule.lookahead_tokens for t in row.nonzero()[:, 0]] for row in flags]


@settings(deadline=None)
@given(rules(), st.integers(1, 3), st.integers(1, 60), st.data())
def test_any_split_equals_one_shot(rule: ChunkRule, rows: int, tokens: int, data: st.DataObject) -> None:
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    whole, whole_state = rule.starts(ids, EMBEDDINGS[ids])
    state, parts, done = None, [], 0
    while done < tokens:
        size = data.draw(st.integers(1, tokens - done))
        part = ids[:, done : done + size]
        flags, state = rule.starts(part, EMBEDDINGS[part], state)
        parts.append(flags)
        done += size
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert state.tokens == whole_state.tokens == tokens


@settings(deadline=None)
@given(texts, st.integers(1, 4), st.integers(0, 8), st.integers(0, 3))
def test_starts_are_the_local_maxima_and_the_cuts(text, radius: int, more: int, salt: int) -> None:
    longest = radius + 1 + more
    score = TokenHash(salt=salt)
    rule = LocalMaximum(score=score, radius_tokens=radius, max_tokens=longest)
    ids = torch.tensor(text)
    flags, _ = rule.starts(ids)
    values = score(ids)[0].tolist()
    expected, last = [], 0
    for t in range(1, len(values) - radius):  # later ones are not decided yet
        left, right = values[max(0, t - radius) : t], values[t + 1 : t + 1 + radius]
        content = all(values[t] > v for v in left) and all(values[t] >= v for v in right)
        if content:
            last = t
        if content or (t - last) % longest == 0:
            expected.append(t)
    assert [int(t) - radius for t in flags[0].nonzero()[:, 0]] == expected


@settings(deadline=None)
@given(rules(), st.integers(2, 60), st.integers(0, 9))
def test_no_chunk_is_longer_than_the_rule_allows(rule: ChunkRule, tokens: int, seed: int) -> None:
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    (found,) = starts(rule, ids)
    edges = [0, *found]
    assert all(0 < b - a <= rule.max_tokens for a, b in pairwise(edges))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 200), st.integers(1, 20), st.integers(0, 5))
def test_an_insertion_moves_starts_with_the_text(radius: int, place: int, more: int, seed: int) -> None:
    """Beyond the insertion plus the radius every start that the content decides moves by exactly `more`."""
    vocabulary = 5000  # hardly two equal tokens within a radius
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (1, 300), generator=generator)
    inserted = torch.randint(0, vocabulary, (1, more), generator=generator)
    longer = torch.cat([ids[:, :place], inserted, ids[:, place:]], dim=1)
    # No chunk of random text is cut at this length: what the content decides is seen alone.
    rule = LocalMaximum(score=TokenHash(salt=seed), radius_tokens=radius, max_tokens=10_000)

    def decided(text: torch.Tensor) -> set[int]:
        flags, _ = rule.starts(text)
        return {int(t) - radius for t in flags[0].nonzero()[:, 0]}

    before, after = decided(ids), decided(longer)
    assert {t + more for t in before if t > place + radius} == {t for t in after if t > place + more + radius}
    assert {t for t in before if t < place - radius} == {t for t in after if t < place - radius}


def test_cuts_of_a_flat_stretch_end_with_it() -> None:
    rule = LocalMaximum(score=TokenHash(), radius_tokens=2, max_tokens=4)
    varied = torch.randint(0, 1000, (1, 40), generator=torch.Generator().manual_seed(1))
    flat = torch.full((1, 30), 7)
    ids = torch.cat([varied, flat, varied], dim=1)
    longer = torch.cat([varied, flat, flat[:, :3], varied], dim=1)
    (first,), (second,) = starts(rule, ids), starts(rule, longer)
    tail = {t for t in first if t > 75}
    assert {t + 3 for t in tail} == {t for t in second if t > 78}
    inside = [t for t in first if 44 < t < 68]
    assert all(b - a == 4 for a, b in pairwise(inside))


def test_ranks_start_chunks_and_zero_ranks_do_not() -> None:
    rule = LocalMaximum(score=TokenRanks(ranks=(0, 5), break_ties=False), radius_tokens=2, max_tokens=50)
    ids = torch.zeros(1, 40, dtype=torch.long)
    ids[0, [6, 20, 21]] = 1
    assert starts(rule, ids) == [[6, 20]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedStride(stride_tokens=0),
        lambda: FixedStride(stride_tokens=4, shift_tokens=4),
        lambda: LocalMaximum(score=TokenHash(), radius_tokens=0, max_tokens=8),
        lambda: LocalMaximum(score=TokenHash(), radius_tokens=8, max_tokens=8),
    ],
)
def test_impossible_rules_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        make()


@settings(deadline=None)
@given(rules(), st.integers(1, 3), st.integers(0, 50), st.integers(0, 30))
def test_every_token_lies_in_exactly_one_chunk(rule: ChunkRule, rows: int, first: int, more: int) -> None:
    """Chunks that close in two calls, together, are those of one call, and cover the tokens without a gap."""
    ids = torch.randint(0, VOCABULARY, (rows, first + more), generator=torch.Generator().manual_seed(first))
    whole, _ = rule.starts(ids, EMBEDDINGS[ids])
    zero = torch.zeros(rows, dtype=torch.long)
    layout, still_open = ChunkLayout.from_flags(whole, rule.lookahead_tokens, 0, zero)
    early, opened = ChunkLayout.from_flags(whole[:, :first], rule.lookahead_tokens, 0, zero)
    late, opened = ChunkLayout.from_flags(whole[:, first:], rule.lookahead_tokens, first, opened)
    assert torch.equal(opened, still_open)
    for row in range(rows):

        def chunks(of: ChunkLayout, row: int = row) -> list[tuple[int, int, int]]:
            picked = of.filled_BE[row]
            return [
                tuple(map(int, c))
                for c in zip(*(t[row][picked] for t in (of.start_BE, of.end_BE, of.close_BE)), strict=True)
            ]

        found = chunks(layout)
        assert chunks(early) + chunks(late) == found
        covered = [t for start, end, _ in found for t in range(start, end)]
        assert covered == list(range(int(still_open[row])))
        assert all(close == end + rule.lookahead_tokens >= end - 1 for _, end, close in found)
        phases = layout.phase(torch.arange(first + more)[None].expand(rows, -1))[row].tolist()
        assert phases[: len(covered)] == [t - start for start, end, _ in found for t in range(start, end)]
        assert set(phases[len(covered) :]) <= {-1}
    lengths, cumulative = layout.to_packed()
    assert lengths.tolist() == [int(n) for row in layout.length_BE for n in row if n]
    assert cumulative.tolist() == [0, *layout.counts_B.cumsum(0).tolist()]
    assert bool((layout.close_BE[~layout.filled_BE] == NEVER).all())
