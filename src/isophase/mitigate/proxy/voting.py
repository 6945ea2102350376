"""One vote: the request at every shift, as many as are needed, and the reply of the winner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isophase.mitigate.proxy.answers import prompt_tokens, read_answer
from isophase.mitigate.proxy.ballot import Ballot
from isophase.mitigate.proxy.headers import Raw
from isophase.mitigate.proxy.upstream import Call, FaultError, Upstream
from isophase.mitigate.vote.rules import Combined, Rule, ShiftAnswer, combine, is_settled

# Faults that every shift would meet: the key, the address, the request itself. Not 429: the others may get through.
_FINAL = (400, 401, 403, 404, 405, 413, 422)


@dataclass(frozen=True, kw_only=True)
class ShiftReply:
    """What came back at one shift.

    Attributes:
        shift_tokens: neutral tokens.
        status: HTTP status; the one that a client would get where there was no reply.
        headers: of the reply.
        body: decoded.
        answer: None: the shift has no vote.
        fault: why there was no reply at all.
    """

    shift_tokens: int
    status: int
    headers: Raw
    body: bytes
    answer: ShiftAnswer | None
    fault: FaultError | None = None


@dataclass(frozen=True, kw_only=True)
class Vote:
    """How a vote went.

    Attributes:
        reply: what the client gets: the winner's, or the fault that no shift escaped.
        combined: None where no shift has a vote.
        rule: by which; majority where log-probabilities are missing.
        replies: of all shifts that were waited for.
        asked: shifts that were asked.
        read_tokens, written_tokens: of all replies, as the server counts them.
        unlike_shifts: shifts that made another number of tokens than they were meant to.
    """

    reply: ShiftReply
    combined: Combined | None
    rule: Rule
    replies: tuple[ShiftReply, ...]
    asked: int
    read_tokens: int
    written_tokens: int
    unlike_shifts: tuple[int, ...]


async def hold_vote(upstream: Upstream, ballot: Ballot, call: Call, bodies: dict[int, bytes], rule: Rule) -> Vote:
    """Ask the shifts that could decide, then the others, until the vote is settled.

    Args:
        upstream: the server.
        ballot: what is asked.
        call: the client's request.
        bodies: by shift, 0 among them.
        rule: how answers are combined.
    """
    shifts = sorted(bodies)
    # A bare majority of equal answers settles the vote, so the others wait for it.
    first = len(shifts) // 2 + 1 if rule == "majority" else len(shifts)
    replies: list[ShiftReply] = []
    waiting: Sequence[int] = shifts
    asked = 0

    def is_over() -> bool:
        if any(one.shift_tokens == 0 and one.status in _FINAL and one.fault is None for one in replies):
            return True
        answers = [one.answer for one in replies if one.answer]
        if rule != "majority" and any(one.score is None for one in answers):
            return False
        settled = {one.shift_tokens for one in replies}
        return is_settled(answers, [shift for shift in shifts if shift not in settled], rule)

    while waiting and not is_over():
        wave, waiting = waiting[:first], waiting[first:]
        asked += len(wave)
        first = len(shifts)
        await _ask(upstream, ballot, call, {shift: bodies[shift] for shift in wave}, replies, is_over)
    return _counted(replies, len(shifts), asked, rule)


async def _ask(
    upstream: Upstream,
    ballot: Ballot,
    call: Call,
    bodies: dict[int, bytes],
    replies: list[ShiftReply],
    is_over: Callable[[], bool],
) -> None:
    """Ask shifts at once; leaves, and breaks off what is in flight, as soon as the vote is over."""
    tasks = {asyncio.create_task(_one(upstream, ballot, call, shift, body)) for shift, body in bodies.items()}
    try:
        while tasks and not is_over():
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            replies.extend(task.result() for task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(upstream: Upstream, ballot: Ballot, call: Call, shift: int, body: bytes) -> ShiftReply:
    try:
        status, headers, raw = await upstream.whole(call._replace(body=body))
    except FaultError as fault:
        return ShiftReply(
            shift_tokens=shift, status=fault.status, headers=[], body=fault.body, answer=None, fault=fault
        )
    answer = read_answer(ballot, shift, raw) if status == 200 else None
    return ShiftReply(shift_tokens=shift, status=status, headers=headers, body=raw, answer=answer)


def _counted(replies: list[ShiftReply], planned: int, asked: int, rule: Rule) -> Vote:
    ordered = sorted(replies, key=lambda one: one.shift_tokens)
    by_shift = {one.shift_tokens: one for one in ordered}
    answers = [one.answer for one in ordered if one.answer]
    unshifted = by_shift.get(0)
    combined = None
    if unshifted and unshifted.status in _FINAL and not unshifted.fault:
        answers = []
    if answers:
        if rule != "majority" and any(one.score is None for one in answers):
            rule = "majority"
        # A shift that failed was not left out because the vote was settled.
        combined = combine(answers, rule, planned=planned - sum(one.answer is None for one in ordered))
    usage = {one.shift_tokens: prompt_tokens(one.body) for one in ordered if one.status == 200}
    return Vote(
        reply=by_shift[combined.winner.shift_tokens] if combined else (unshifted or ordered[0]),
        combined=combined,
        rule=rule,
        replies=tuple(ordered),
        asked=asked,
        read_tokens=sum(read for read, _ in usage.values()),
        written_tokens=sum(written for _, written in usage.values()),
        unlike_shifts=_unlike({shift: read for shift, (read, _) in usage.items() if read}),
    )


def _unlike(read_tokens: dict[int, int]) -> tuple[int, ...]:
    """Shifts whose prompts are not longer than the shortest one by what they were meant to be."""
    if not read_tokens:
        return ()
    first = min(read_tokens)
    return tuple(shift for shift, read in read_tokens.items() if read - read_tokens[first] != shift - first)
