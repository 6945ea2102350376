"""The plan against brute force, and what it promises of every span."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.mitigate.align.plan import Span, align, wanted_phases


def spans_of(pieces):
    """(gap, length) pairs as spans."""
    found, at = [], 0
    for gap, length in pieces:
        found.append(Span(at + gap, length))
        at += gap + length
    return found


curves = st.integers(2, 6).flatmap(
    lambda stride: st.tuples(
        st.just(stride),
        st.one_of(st.just([]), st.lists(st.sampled_from([0.1, 0.5, 0.93, 0.97]), min_size=stride, max_size=stride)),
    )
)


@settings(deadline=None)
@given(curves, st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), min_size=1, max_size=4))
def test_no_choice_of_insertions_is_cheaper(curve, pieces):
    stride, accuracy = curve
    spans = spans_of(pieces)
    plan = align(spans, stride, accuracy)
    ok = [wanted_phases(span.length_tokens, stride, np.array(accuracy), 5.0) for span in spans]
    cheapest = min(
        sum(tokens)
        for tokens in itertools.product(range(stride), repeat=len(spans))
        if all(
            good[(span.start_tokens + moved) % stride]
            for span, moved, good in zip(spans, itertools.accumulate(tokens), ok, strict=True)
        )
    )
    assert plan.added_tokens == cheapest
    assert plan.misplaced == plan.straddling == 0
    # The insertions are what moves the spans.
    for span, start in zip(spans, plan.starts_tokens, strict=True):
        assert start == span.start_tokens + sum(n for at, n in plan.insertions if at <= span.start_tokens)


@settings(deadline=None)
@given(
    curves,
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=5),
    st.sets(st.integers(0, 30), max_size=3),
)
def test_few_openings_leave_as_few_spans_misplaced_as_can_be(curve, pieces, openings):
    stride, accuracy = curve
    spans = spans_of(pieces)
    plan = align(spans, stride, accuracy, openings_tokens=sorted(openings))
    usable = [o for o in sorted(openings) if not any(s.start_tokens < o < sum(s) for s in spans)]
    ok = [wanted_phases(span.length_tokens, stride, np.array(accuracy), 5.0) for span in spans]

    def result(tokens):
        moved = [sum(n for at, n in zip(usable, tokens, strict=True) if at <= span.start_tokens) for span in spans]
        wrong = sum(not g[(s.start_tokens + m) % stride] for s, m, g in zip(spans, moved, ok, strict=True))
        return wrong, sum(tokens)

    best = min(result(tokens) for tokens in itertools.product(range(stride), repeat=len(usable)))
    assert (plan.misplaced, plan.added_tokens) == best
    assert {at for at, _ in plan.insertions} <= set(usable)


def test_spans_longer_than_the_stride():
    strong = [0.2, 0.9, 0.88, 0.3]
    assert align([Span(0, 9)], 4, strong).starts_tokens == (1,)
    # Nothing known of phases: 5 tokens need two chunks, so phases 0 to 3 are alike, and 8 tokens need phase 0.
    assert align([Span(3, 5), Span(9, 8)], 4).starts_tokens == (3, 12)


def test_a_strong_phase_that_would_straddle_is_not_taken():
    accuracy = [0.5, 0.6, 0.4, 0.9]
    assert align([Span(3, 2)], 4, accuracy).starts_tokens == (5,)  # the best of 0 to 2


def test_records_of_sixteen_tokens_cost_little():
    rng = np.random.default_rng(0)
    accuracy = [0.95] * 7 + [0.2]  # the bundled w8s8, about
    spans = spans_of([(0, int(n)) for n in rng.integers(16, 40, size=500)])
    plan = align(spans, 8, accuracy)
    assert plan.misplaced_before > 50
    assert plan.misplaced == 0
    assert plan.added_tokens < 0.02 * sum(span.length_tokens for span in spans)


def test_faults():
    with pytest.raises(IsophaseError, match="stride is 0"):
        align([], 0)
    with pytest.raises(IsophaseError, match="4 phases and the stride is 8"):
        align([Span(0, 1)], 8, [1.0] * 4)
    with pytest.raises(ValueError, match="overlaps"):
        align([Span(0, 3), Span(2, 1)], 4)
    assert align([], 4).insertions == ()
