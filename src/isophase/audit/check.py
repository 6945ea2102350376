"""Does the answer to one's own prompt change when neutral tokens are inserted? And with which, and in what period?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from isophase.audit.series import SeriesPeriod, series_period
from isophase.errors import IsophaseError
from isophase.probes import OwnPrompt, Prompt, Tokenizer
from isophase.targets import Answer, StreamingTarget, Target

CheckVerdict = Literal["stable", "sensitive", "inconclusive"]

# Of one stride told beforehand, and of periods that were searched for.
_ALPHA_TOLD, _ALPHA_SEARCHED = 0.05, 0.01
_LAPS = 3
_FEWEST_SHIFTS, _SHIFTS_WITHOUT_STRIDE, _MOST_SHIFTS = 24, 48, 256
# An answer ends here when nobody says where: a special token such as <|im_end|>, or a line's end.
_END = re.compile(r"<[|/]?[\w ]+[|]?>|.*\n.*", re.DOTALL)


class ShiftOutcome(BaseModel):
    """What came of one number of inserted tokens."""

    model_config = ConfigDict(frozen=True)

    shift_tokens: int
    phase: int | None = Field(description="of the marked position, modulo the stride or the period found")
    status: str = Field(description="ok, truncated or error")
    same: bool | None = Field(description="whether the answer is the expected one (or that of the unchanged prompt)")
    log_probability: float | None = Field(description="of that answer, natural log")
    output: str = Field(description="what the target says, up to the first token that differs")
    detail: str = ""


class CheckResult(BaseModel):
    """`isophase check`: everything found."""

    model_config = ConfigDict(frozen=True)

    target: str
    verdict: CheckVerdict
    sentence: str
    reasons: list[str]
    advice: list[str]
    answer: str = Field(description="the answer that all shifts are held against")
    tokens: int = Field(description="of the unchanged prompt, start-of-text included")
    position_tokens: int = Field(description="where neutral tokens are inserted")
    stride_tokens: int | None = Field(description="of the model's configuration; null where it names none")
    period_tokens: int | None
    period_p_value: float | None
    period_source: Literal["answers", "log-probability"] | None
    changed_shifts: list[int] = Field(description="shifts at which the answer is another one")
    one_stride_agrees: bool | None = Field(
        description="control: whether one whole stride of inserted tokens leaves the answer as it is"
    )
    repeat_agrees: bool | None = Field(description="control: whether the unchanged prompt, asked again, says the same")
    recommended_shifts: list[int]
    recommended_positions: list[int] = Field(description="positions of the mark at these shifts")
    shifts: list[ShiftOutcome]
    notes: list[str]


def shifts_to_ask(wanted: int | None, stride_tokens: int | None) -> list[int]:
    """Numbers of tokens to insert, from 0.

    Args:
        wanted: largest shift; None: three whole strides, at least 24 shifts, or 48 where no stride is known.
        stride_tokens: S.

    Raises:
        IsophaseError: `wanted` is below 1, or more than can be sensible.
    """
    if wanted is not None:
        if not 1 <= wanted <= 4096:
            raise IsophaseError(f"--shifts is {wanted}; it must lie between 1 and 4096.", "Give auto or such a number.")
        return list(range(wanted + 1))
    if stride_tokens is None:
        return list(range(_SHIFTS_WITHOUT_STRIDE))
    whole = max(_LAPS * stride_tokens, math.ceil(_FEWEST_SHIFTS / stride_tokens) * stride_tokens)
    return list(range(max(min(whole, _MOST_SHIFTS), stride_tokens + 1)))


def run_check(
    own: OwnPrompt,
    target: Target,
    *,
    expected: str | None,
    shifts: int | None = None,
    answer_tokens: int = 8,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> CheckResult:
    """Ask a prompt at every shift.

    Args:
        own: the prompt and its mark.
        target: who answers.
        expected: the right answer; None: whatever the unchanged prompt is answered with.
        shifts: largest number of inserted tokens, or None to choose.
        answer_tokens: tokens compared where no answer is expected.
        advance: told how many prompts of how many are answered.

    Returns:
        The result.

    Raises:
        IsophaseError: the prompt is too long, or the unchanged prompt gets no answer.
    """
    stride = max((g.stride_tokens for g in target.grids if g.kind == "payload"), default=None)
    asked = shifts_to_ask(shifts, stride)
    longest = len(own.ids) + asked[-1] + (len(own.answers(expected)[0]) if expected else answer_tokens)
    limit = target.max_length_tokens
    if limit is not None and longest > limit:
        raise IsophaseError(
            f"the prompt has {len(own.ids)} tokens; with {asked[-1]} inserted and the answer it takes {longest}, and "
            f"{target.name} reads {limit}.",
            "Shorten it, or give fewer --shifts.",
        )
    spellings = own.answers(expected) if expected is not None else []
    answer = _likelier(target, own, spellings) if spellings else _greedy(target, own, answer_tokens)
    prompts = [own.prompt(k, answer) for k in (*asked, 0)]
    answers: dict[int, Answer] = {}
    for number, given in _ask(target, prompts):
        answers[number] = given
        advance(len(answers), len(prompts))
    repeat = answers.pop(len(asked))
    facts = target.describe().get("notes")
    notes = [str(note) for note in facts] if isinstance(facts, Iterable) else []
    return _result(own, target, answer, asked, answers, repeat, stride, notes, expected)


def _ask(target: Target, prompts: Sequence[Prompt]) -> Iterable[tuple[int, Answer]]:
    if isinstance(target, StreamingTarget):
        return target.stream(prompts)
    return enumerate(target.answer(prompts))


def _greedy(target: Target, own: OwnPrompt, tokens: int) -> tuple[int, ...]:
    """The first tokens that the target says to the unchanged prompt.

    Models in this process say one token behind the first that is not the one asked for; servers say all.
    """
    said: list[int] = []
    while len(said) < tokens:
        prompt = own.prompt(0, [*said, *[0] * (tokens - len(said))])
        (answer,) = target.answer([prompt])
        if answer.status == "error":
            raise IsophaseError(f"{target.name} gives no answer: {answer.detail}.", "Check the target.")
        if len(answer.output_ids) <= len(said):
            break
        said = list(answer.output_ids)
        if (end := _end_of(said, own.tokenizer)) is not None:
            said = said[:end]
            break
    if not said:
        raise IsophaseError(
            f"{target.name} says nothing to the unchanged prompt.",
            "Give --expect, or end the prompt where an answer starts.",
        )
    return tuple(said)


def _end_of(ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """Number of tokens before an answer's end; None where it does not end. The first token always counts."""
    for place, token in enumerate(ids[1:], start=1):
        if _END.fullmatch(tokenizer.decode([token]).strip(" ")):
            return place
    return None


def _likelier(target: Target, own: OwnPrompt, spellings: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The spelling of an expected answer that the target would use."""
    if len(spellings) == 1:
        return spellings[0]
    answers = list(target.answer([own.prompt(0, ids) for ids in spellings]))

    def rank(number: int) -> tuple[bool, float, int]:
        given = answers[number]
        known = given.log_probability if math.isfinite(given.log_probability) else -math.inf
        return given.correct, known, -number

    return spellings[max(range(len(spellings)), key=rank)]


def _result(
    own: OwnPrompt,
    target: Target,
    answer: tuple[int, ...],
    asked: list[int],
    answers: Mapping[int, Answer],
    repeat: Answer,
    stride: int | None,
    notes: list[str],
    expected: str | None,
) -> CheckResult:
    judged = {k: answers[k].correct for k in asked if answers[k].status in ("ok", "wrong_format")}
    changed = [k for k, right in judged.items() if not right]
    found, source = _period(asked, answers, judged, stride)
    period = found.period_tokens if found else None
    axis = period or stride
    one_stride = judged.get(axis) == judged.get(0) if axis in judged and 0 in judged else None
    repeat_agrees = repeat.correct == judged[0] if 0 in judged and repeat.status in ("ok", "wrong_format") else None
    mixed = bool(changed) and len(changed) < len(judged)
    verdict: CheckVerdict = "stable"
    if mixed:
        verdict = "sensitive"
    elif not judged or len(judged) < len(asked) or changed:
        verdict = "inconclusive"
    good = _recommended(asked, answers, judged, axis)
    text = own.tokenizer.decode(answer)
    return CheckResult(
        target=target.name,
        verdict=verdict,
        sentence=_sentence(target.name, verdict, asked, judged, changed, period, expected is not None),
        reasons=_reasons(asked, judged, found, source, axis, one_stride, repeat_agrees),
        advice=_advice(verdict, own, good, axis),
        answer=text,
        tokens=len(own.ids),
        position_tokens=own.position_tokens,
        stride_tokens=stride,
        period_tokens=period,
        period_p_value=found.p_value if found else None,
        period_source=source,
        changed_shifts=changed,
        one_stride_agrees=one_stride,
        repeat_agrees=repeat_agrees,
        recommended_shifts=good,
        recommended_positions=[own.position_tokens + k for k in good],
        shifts=[_outcome(own, k, answers[k], judged, axis) for k in asked],
        notes=notes,
    )


def _outcome(own: OwnPrompt, shift: int, answer: Answer, judged: Mapping[int, bool], axis: int | None) -> ShiftOutcome:
    finite = math.isfinite(answer.log_probability)
    return ShiftOutcome(
        shift_tokens=shift,
        phase=(own.position_tokens + shift) % axis if axis else None,
        status="ok" if shift in judged else answer.status,
        same=judged.get(shift),
        log_probability=answer.log_probability if finite else None,
        output=own.tokenizer.decode(answer.output_ids) if answer.output_ids else "",
        detail=answer.detail,
    )


def _period(
    asked: Sequence[int], answers: Mapping[int, Answer], judged: Mapping[int, bool], stride: int | None
) -> tuple[SeriesPeriod | None, Literal["answers", "log-probability"] | None]:
    """A period of the answers, else of their log-probability; the stride alone where it is known."""
    if len(judged) < len(asked):
        return None, None
    candidates = [stride] if stride else range(2, len(asked) // _LAPS + 1)
    alpha = _ALPHA_TOLD if stride else _ALPHA_SEARCHED
    found = series_period([float(judged[k]) for k in asked], candidates)
    if found and found.p_value < alpha:
        return found, "answers"
    values = [answers[k].log_probability for k in asked]
    if all(map(math.isfinite, values)):
        found = series_period(values, candidates)
        if found and found.p_value < alpha:
            return found, "log-probability"
    return None, None


def _recommended(
    asked: Sequence[int], answers: Mapping[int, Answer], judged: Mapping[int, bool], axis: int | None
) -> list[int]:
    """Shifts of one lap whose answer holds in every lap, the surest first; three at most."""
    lap = axis or len(asked)
    rows = []
    for first in range(min(lap, len(asked))):
        same = [k for k in asked if k % lap == first]
        if all(judged.get(k) for k in same):
            known = [answers[k].log_probability for k in same if math.isfinite(answers[k].log_probability)]
            rows.append((-min(known) if known else 0.0, first))
    return [first for _, first in sorted(rows)[:3]]


def _sentence(
    name: str,
    verdict: CheckVerdict,
    asked: Sequence[int],
    judged: Mapping[int, bool],
    changed: Sequence[int],
    period: int | None,
    expects: bool,
) -> str:
    what = "the expected answer" if expects else "the answer of the unchanged prompt"
    if verdict == "stable":
        return f"{name} gives {what} at all {len(asked)} shifts (0 to {asked[-1]} neutral tokens)."
    if verdict == "sensitive":
        tail = f", with a period of {period} tokens" if period else ", without a period that could be shown"
        return f"{name} changes its answer at {len(changed)} of {len(judged)} shifts ({_runs(changed)}){tail}."
    if not judged:
        return f"{name} could not be judged: no shift got an answer."
    if changed:
        return f"{name} gives {what} at none of {len(judged)} shifts, so nothing can depend on the phase."
    return f"{name} gives {what} wherever it answers, but {len(asked) - len(judged)} of {len(asked)} shifts failed."


def _reasons(
    asked: Sequence[int],
    judged: Mapping[int, bool],
    found: SeriesPeriod | None,
    source: str | None,
    axis: int | None,
    one_stride: bool | None,
    repeat_agrees: bool | None,
) -> list[str]:
    lines = []
    if found:
        lines.append(
            f"{source}: shifts that differ by {found.period_tokens} tokens agree (adjusted R squared "
            f"{found.explained:.2f}, p = {found.p_value:.2g} by random orders)"
        )
    if one_stride is not None:
        does = "leaves the answer as it is" if one_stride else "changes the answer, so more than the phase is at work"
        lines.append(f"control: inserting exactly {axis} tokens {does}")
    if repeat_agrees is not None:
        does = "says the same" if repeat_agrees else "says something else: the target is not deterministic"
        lines.append(f"control: the unchanged prompt, asked again, {does}")
    if len(judged) < len(asked):
        lines.append(f"{len(asked) - len(judged)} shifts got no answer that can be judged")
    return lines


def _advice(verdict: CheckVerdict, own: OwnPrompt, good: Sequence[int], axis: int | None) -> list[str]:
    if verdict == "stable":
        return ["Nothing to do for this prompt and this mark; other marks and prompts are other questions."]
    if verdict == "inconclusive" or not good:
        return ["Ask for an answer that the target gives, or mark another place with --at."]
    where = f" (position mod {axis}: {', '.join(str((own.position_tokens + k) % axis) for k in good)})" if axis else ""
    return [
        f"Surest with {_listed(good)} neutral tokens at the mark: it then starts at position "
        f"{_listed([own.position_tokens + k for k in good])}{where}.",
        "Where that cannot be kept, ask at several shifts and compare the answers.",
    ]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])


def _runs(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")
