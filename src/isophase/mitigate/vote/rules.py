"""One answer out of several: the same request asked at several shifts, combined by a rule.

A shift that tells nothing but its own answer leaves the other answers' probabilities there unknown. Where a
rule needs them, they get the most that they can have: the rest, 1 - p, but no more than the answer that was
preferred to them. A probability is that of the whole answer, or, where token log-probabilities are known, their
geometric mean, so that long answers are not weaker for being long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from isophase.errors import IsophaseError

Rule = Literal["majority", "confidence", "mean-log-probability", "mean-probability"]
RULES: tuple[str, ...] = get_args(Rule)

_LEAST_PROBABILITY = 1e-9
"""Of an answer that a shift is certain against: its logarithm must stay finite."""
_DIGITS = 9
"""Scores that agree so far are a tie: sums of the same numbers in another order differ in the last digits."""


@dataclass(frozen=True, kw_only=True)
class ShiftAnswer:
    """What one shift answered.

    Attributes:
        shift_tokens: neutral tokens that were inserted, >= 0; 0 is the request as it is.
        answer: what is compared: the text, or a canonical form of it.
        log_probability: natural log of the probability of the whole answer, <= 0; None where unknown.
        token_log_probabilities: natural logs, one per token of the answer; empty where unknown.
        choices: natural logs of the probabilities of other answers at this shift, where they were scored.
    """

    shift_tokens: int
    answer: str
    log_probability: float | None = None
    token_log_probabilities: tuple[float, ...] = ()
    choices: Mapping[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """Natural log of the probability: per token where tokens are known; None where nothing is."""
        if self.token_log_probabilities:
            return math.fsum(self.token_log_probabilities) / len(self.token_log_probabilities)
        return self.log_probability


@dataclass(frozen=True, kw_only=True)
class Combined:
    """What a vote came to.

    Attributes:
        winner: the answer of the smallest shift that gave the winning answer: what a client receives.
        agreeing: shifts that gave it.
        total: shifts that answered.
        planned: shifts that were to be asked, >= total.
        settled_early: whether shifts were left out because they could not have changed the winner.
        scores: by answer; votes, summed confidence or mean, depending on the rule.
    """

    winner: ShiftAnswer
    agreeing: int
    total: int
    planned: int
    settled_early: bool
    scores: Mapping[str, float]


def combine(answers: Sequence[ShiftAnswer], rule: Rule = "majority", *, planned: int | None = None) -> Combined:
    """Combine the answers of one request.

    A tie goes to the answer that more shifts gave, then to that of the unshifted request, then to that of the
    smallest shift; the order of `answers` does not matter.

    Args:
        answers: one per shift, at least one, no shift twice.
        rule: `majority`: most shifts; `confidence`: every shift votes with its answer's probability;
            `mean-log-probability`, `mean-probability`: largest mean over all shifts.
        planned: shifts that were to be asked; None: no more than answered.

    Returns:
        The winner with the count of shifts that agree.

    Raises:
        IsophaseError: the rule needs probabilities and a shift has none, or it is unknown.
        ValueError: no answer, a shift twice, a log-probability above 0, or fewer planned than answered.
    """
    planned = len(answers) if planned is None else planned
    _check(answers, rule, planned)
    ordered = sorted(answers, key=lambda one: one.shift_tokens)
    scores = _scores(ordered, rule)
    winner = _winner(ordered, scores)
    return Combined(
        winner=winner,
        agreeing=sum(one.answer == winner.answer for one in ordered),
        total=len(ordered),
        planned=planned,
        settled_early=planned > len(ordered),
        scores=scores,
    )


def is_settled(answers: Sequence[ShiftAnswer], missing_shifts: Sequence[int], rule: Rule = "majority") -> bool:
    """Whether nothing that the remaining shifts may answer can change the winning answer.

    No outcome is worse for the leader than one in which all remaining shifts give one and the same other answer,
    with certainty, so one trial per other answer decides: exact for `majority`, and for the other rules as far
    as a shift may be certain. `mean-log-probability` is hardly ever settled early: one shift that rules an
    answer out outweighs all others.

    Args:
        answers: so far, maybe none.
        missing_shifts: tokens of the shifts that have not answered.
        rule: as in `combine`.
    """
    if not answers:
        return False
    if not missing_shifts:
        return True
    leader = combine(answers, rule).winner.answer
    stranger = "".join(sorted({one.answer for one in answers})) + "?"  # longer than each: nobody gave it
    for other in {stranger, *(one.answer for one in answers)} - {leader}:
        worst = [
            ShiftAnswer(shift_tokens=shift, answer=other, log_probability=0.0, choices={leader: -math.inf})
            for shift in missing_shifts
        ]
        if combine([*answers, *worst], rule).winner.answer != leader:
            return False
    return True


def _check(answers: Sequence[ShiftAnswer], rule: str, planned: int) -> None:
    if rule not in RULES:
        raise IsophaseError(f"the rule {rule!r} is unknown.", f"Give {', '.join(RULES)}.")
    if not answers:
        raise ValueError("there is no answer to combine")
    shifts = [one.shift_tokens for one in answers]
    if len(set(shifts)) < len(shifts):
        raise ValueError(f"a shift answered twice: {sorted(shifts)}")
    if planned < len(answers):
        raise ValueError(f"{len(answers)} shifts answered and only {planned} were planned")
    for one in answers:
        if one.score is None:
            if rule != "majority":
                raise IsophaseError(
                    f"the rule {rule} needs log-probabilities, and shift {one.shift_tokens} has none.",
                    "Use majority, or a server that gives logprobs.",
                )
        elif not one.score <= 1e-6:
            raise ValueError(f"the log-probability of shift {one.shift_tokens} is {one.score}; it must be at most 0")


def _scores(ordered: Sequence[ShiftAnswer], rule: str) -> dict[str, float]:
    """By answer, in the order of the smallest shift that gave it."""
    names = list(dict.fromkeys(one.answer for one in ordered))
    if rule == "majority":
        return {name: float(sum(one.answer == name for one in ordered)) for name in names}
    if rule == "confidence":
        return {name: math.fsum(_probability(one, name) for one in ordered if one.answer == name) for name in names}
    scores = {}
    for name in names:
        values = [_probability(one, name) for one in ordered]
        if rule == "mean-log-probability":
            values = [math.log(max(value, _LEAST_PROBABILITY)) for value in values]
        scores[name] = math.fsum(values) / len(values)
    return scores


def _probability(one: ShiftAnswer, name: str) -> float:
    """Of an answer at a shift: its own, a scored one, or the most that an answer not given can have."""
    assert one.score is not None
    given = min(1.0, math.exp(one.score))
    if name == one.answer:
        return given
    if name in one.choices:
        return math.exp(one.choices[name])
    return min(1.0 - given, given)


def _winner(ordered: Sequence[ShiftAnswer], scores: Mapping[str, float]) -> ShiftAnswer:
    def rank(place: int) -> tuple[float, int, int]:
        name = ordered[place].answer
        votes = sum(one.answer == name for one in ordered)
        return round(scores[name], _DIGITS), votes, -place

    return ordered[max(range(len(ordered)), key=rank)]
