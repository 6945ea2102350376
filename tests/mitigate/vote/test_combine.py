"""Rules against what they are defined as, and settling against every possible outcome."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.mitigate.vote.rules import RULES, ShiftAnswer, combine, is_settled


def votes(text: str, probabilities: tuple[float, ...] = ()) -> list[ShiftAnswer]:
    """Shift n answers letter n; `_`: it has not answered."""
    known = [math.log(p) for p in probabilities] or [None] * len(text)
    return [
        ShiftAnswer(shift_tokens=n, answer=letter, log_probability=known[n])
        for n, letter in enumerate(text)
        if letter != "_"
    ]


def test_most_shifts_win():
    found = combine(votes("abba"[:3] + "b"), planned=8)
    assert (found.winner.answer, found.winner.shift_tokens, found.agreeing, found.total) == ("b", 1, 3, 4)
    assert found.settled_early
    assert found.scores == {"a": 1.0, "b": 3.0}
    assert not combine(votes("a")).settled_early


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_tie_goes_to_the_request_as_it_is_in_every_order(order):
    answers = votes("abab")
    assert combine([answers[n] for n in order]).winner == answers[0]
    later = [ShiftAnswer(shift_tokens=n + 1, answer=letter) for n, letter in enumerate("cddc")]
    assert combine([later[n] for n in order]).winner.answer == "c"  # without it: the smallest shift


def test_confidence_outweighs_numbers():
    answers = votes("abb", (0.9, 0.3, 0.4))
    assert combine(answers).winner.answer == "b"
    assert combine(answers, "confidence").winner.answer == "a"


def test_means_count_what_an_answer_has_at_the_other_shifts():
    answers = votes("abb", (0.9, 0.6, 0.6))
    # a: (.9 + .4 + .4) / 3, b: (.1 + .6 + .6) / 3.
    assert combine(answers, "mean-probability").scores == pytest.approx({"a": 1.7 / 3, "b": 1.3 / 3})
    expected = (math.log(0.1) + 2 * math.log(0.6)) / 3
    assert combine(answers, "mean-log-probability").scores["b"] == pytest.approx(expected)
    # Scored alternatives replace what is assumed of them.
    known = ShiftAnswer(shift_tokens=0, answer="a", log_probability=math.log(0.9), choices={"b": math.log(0.05)})
    assert combine([known, *answers[1:]], "mean-probability").scores["b"] == pytest.approx(1.25 / 3)


def test_where_nothing_is_known_of_the_others_numbers_decide():
    for rule in RULES:
        assert combine(votes("abbb", (0.2, 0.2, 0.2, 0.2)), rule).winner.answer == "b"


def test_long_answers_are_not_weaker_for_being_long():
    long = ShiftAnswer(shift_tokens=0, answer="a" * 50, token_log_probabilities=(math.log(0.9),) * 50)
    short = ShiftAnswer(shift_tokens=1, answer="b", token_log_probabilities=(math.log(0.8),))
    assert long.score == pytest.approx(math.log(0.9))
    for rule in RULES[1:]:
        assert combine([long, short], rule).winner is long


def test_faults_are_named():
    with pytest.raises(IsophaseError, match=r"needs log-probabilities, and shift 1 has none"):
        combine([ShiftAnswer(shift_tokens=1, answer="a")], "confidence")
    with pytest.raises(IsophaseError, match="unknown"):
        combine(votes("a"), "median")  # type: ignore[arg-type]
    for wrong in ([], votes("a") * 2, votes("a", (1.5,))):
        with pytest.raises(ValueError):
            combine(wrong)
    with pytest.raises(ValueError):
        combine(votes("aab"), planned=2)


@given(st.text("abc_", min_size=1, max_size=6))
def test_a_vote_is_settled_exactly_where_no_outcome_changes_the_winner(text):
    answers = votes(text)
    missing = [n for n, letter in enumerate(text) if letter == "_"]
    if not answers:
        assert not is_settled(answers, missing)
        return
    winner = combine(answers).winner.answer
    outcomes = itertools.product("abcxy", repeat=len(missing))
    same = all(
        combine([*answers, *(ShiftAnswer(shift_tokens=n, answer=a) for n, a in zip(missing, outcome, strict=True))])
        .winner.answer == winner
        for outcome in outcomes
    )  # fmt: skip
    assert is_settled(answers, missing) == same


@given(
    st.text("ab_", min_size=2, max_size=5),
    st.sampled_from(RULES),
    st.lists(st.tuples(st.sampled_from("abx"), st.floats(0.01, 1)), min_size=5, max_size=5),
    st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
)
def test_what_is_settled_stays_so_whatever_comes(text, rule, rest, known):
    answers = votes(text, tuple(known))
    missing = [n for n, letter in enumerate(text) if letter == "_"]
    if not answers or not is_settled(answers, missing, rule):
        return
    more = [
        ShiftAnswer(shift_tokens=n, answer=letter, log_probability=math.log(p))
        for n, (letter, p) in zip(missing, rest, strict=False)
    ]
    assert combine([*answers, *more], rule).winner.answer == combine(answers, rule).winner.answer
