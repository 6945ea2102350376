"""One request through the proxy: passed on byte by byte, voted on, or aligned and passed on."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from starlette.types import Message, Receive, Scope, Send

from isophase.mitigate.align.text import LocatingTokenizer
from isophase.mitigate.proxy.aligning import Aligner
from isophase.mitigate.proxy.answers import as_stream, without_log_probabilities
from isophase.mitigate.proxy.ballot import CHAT, COMPLETIONS, Ballot, UnvotableError, bodies, cost_tokens, read_ballot
from isophase.mitigate.proxy.headers import Overrides, Raw, RefusedError, handed_back, header_value, overrides, sent_on
from isophase.mitigate.proxy.intake import check_framing, hang_up, read_body, target_of
from isophase.mitigate.proxy.settings import ProxySettings
from isophase.mitigate.proxy.upstream import Call, FaultError, Upstream
from isophase.mitigate.proxy.voting import Vote, hold_vote
from isophase.mitigate.proxy.watch import Metrics, say
from isophase.mitigate.vote.shifts import NeutralTexts, choose_shifts

HUNG_UP = 499
"""Status in logs and metrics where the client went away; nobody receives it."""

_VOTED = (CHAT, COMPLETIONS)
PASSED_ON = {
    **dict.fromkeys(("embeddings", "rerank", "score", "moderations", "responses"), "POST"),
    **dict.fromkeys((path.removeprefix("/v1/") for path in _VOTED), "POST"),
    "models": "GET",
}
"""Paths below /v1 and their method. Uploads, files and batches are stateful, so they are not passed on."""


@dataclass(kw_only=True)
class Note:
    """What is logged about a request."""

    id: str
    route: str = "other"
    policy: str = "off"
    status: int = HUNG_UP
    bytes_in: int = 0
    bytes_out: int = 0
    agreement: str | None = None
    unvoted: str | None = None
    shift_tokens: int | None = None
    asked: int | None = None
    failed: int | None = None
    read_tokens: int | None = None
    written_tokens: int | None = None
    added_tokens: int | None = None
    fault: str | None = None


class Exchange:
    """Answers everything below `/v1`.

    Args:
        settings: of the proxy, checked.
        upstream: the server.
        metrics: where requests are counted.
        tokenizer: of the model, or None.
    """

    def __init__(
        self, settings: ProxySettings, upstream: Upstream, metrics: Metrics, tokenizer: LocatingTokenizer | None
    ) -> None:
        self._settings, self._upstream, self._metrics = settings, upstream, metrics
        self._neutral = NeutralTexts(tokenizer, settings.unit)
        self._aligner = Aligner(settings, tokenizer)
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        note = Note(id=uuid.uuid4().hex[:16])
        began = time.perf_counter()

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
            note.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._serve(scope, receive, noted_send, note)
        except RefusedError as refusal:
            note.fault = refusal.code
            if isinstance(refusal, FaultError):
                self._metrics.faults.labels(refusal.code).inc()
            # Behind the start of a reply there is no other way to tell than to break off.
            if note.status == HUNG_UP:
                headers = [(b"content-type", b"application/json"), *refusal.headers]
                await _send_whole(noted_send, refusal.status, headers, refusal.body)
        except ConnectionError:
            note.status = HUNG_UP
        finally:
            seconds = time.perf_counter() - began
            self._metrics.requests.labels(note.route, note.policy, str(note.status)).inc()
            self._metrics.seconds.labels(note.route, note.policy).observe(seconds)
            say("request", method=scope["method"][:16], seconds=round(seconds, 4), **asdict(note))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, note: Note) -> None:
        headers: Raw = scope["headers"]
        check_framing(headers)
        target = target_of(scope)
        path = target.split(b"?")[0].decode()
        first = path.split("/")[2]
        name = path.removeprefix("/v1/") if first != "models" else "models"
        if name not in PASSED_ON:
            raise RefusedError(404, "this path below /v1 is not passed on by the proxy.", "not_found")
        note.route = f"/v1/{name}"
        method = PASSED_ON[name]
        if scope["method"] != method:
            allow = [(b"allow", method.encode())]
            raise RefusedError(405, f"this path is asked with {method}.", "method_not_allowed", allow)
        wanted = overrides(headers, self._settings)
        body = await read_body(headers, receive, self._settings.body_bytes)
        note.bytes_in = len(body)
        call = Call(method, target, sent_on(headers), body)
        work = asyncio.ensure_future(self._answer(call, path, wanted, send, note))
        gone = asyncio.ensure_future(hang_up(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled work closes its connections, so the server stops generating for nobody.
            ended = work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not ended:
            raise ConnectionError("the client went away")
        work.result()

    async def _answer(self, call: Call, path: str, wanted: Overrides, send: Send, note: Note) -> None:
        """Choose what to do; a request that the policy cannot treat is passed on, and a header says why."""
        more: Raw = []
        if path in _VOTED and wanted.policy != "off":
            note.policy = wanted.policy
            try:
                if wanted.policy == "vote":
                    ballot = read_ballot(path, call.body)
                    await self._vote(call, ballot, wanted, send, note)
                    return
                call, note.added_tokens = await asyncio.to_thread(self._aligner.aligned, path, call)
                more = [(b"x-isophase-added-tokens", str(note.added_tokens).encode())]
            except UnvotableError as error:
                note.unvoted = str(error)
                if wanted.policy == "vote":
                    self._metrics.votes.labels("unvoted").inc()
                    more = [(b"x-isophase-agreement", header_value(f"unvoted; {error}"))]
                else:
                    more = [(b"x-isophase-added-tokens", header_value(f"none; {error}"))]
        await self._pass_on(call, more, send)

    async def _pass_on(self, call: Call, more: Raw, send: Send) -> None:
        """The server's reply as it comes, byte by byte."""
        with self._room(1):
            async with self._upstream.reply(call) as response:
                headers = handed_back(response.headers.raw) + more
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for part in response.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _vote(self, call: Call, ballot: Ballot, wanted: Overrides, send: Send, note: Note) -> None:
        shifts = choose_shifts(self._settings.strides_tokens, wanted.shifts)
        cost = cost_tokens(ballot, shifts, call.body)
        if cost > self._settings.cost_tokens:
            raise UnvotableError(f"about {cost} tokens are above the limit of {self._settings.cost_tokens}")
        scored = wanted.rule != "majority"
        # Beside the loop: a long body at many shifts takes a while to write.
        made = await asyncio.to_thread(bodies, ballot, call.body, shifts, self._settings, self._neutral, scored)
        # What is compared must be readable, whatever the client can decode.
        headers = [(name, value) for name, value in call.headers if name != b"accept-encoding"]
        plain = call._replace(headers=[*headers, (b"accept-encoding", b"identity")])
        with self._room(len(shifts)):
            vote = await hold_vote(self._upstream, ballot, plain, made, wanted.rule)
        self._count(vote, note)
        body, reply = vote.reply.body, vote.reply
        back = handed_back(reply.headers, same_body=False)
        if vote.combined is None:
            if reply.fault:
                raise reply.fault
            back.append((b"x-isophase-agreement", b"unvoted; no shift was answered"))
            await _send_whole(send, reply.status, back, body)
            return
        if scored and not ballot.wants_log_probabilities:
            body = without_log_probabilities(body)
        if ballot.streamed:
            body = as_stream(ballot, body)
            back = [pair for pair in back if pair[0] != b"content-type"]
            back += [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        back += [
            (b"x-isophase-agreement", f"{vote.combined.agreeing}/{vote.combined.total}".encode()),
            (b"x-isophase-shift", str(reply.shift_tokens).encode()),
            (b"x-isophase-rule", vote.rule.encode()),
            (b"x-isophase-asked", str(vote.asked).encode()),
            (b"x-isophase-tokens", f"{vote.read_tokens}+{vote.written_tokens}".encode()),
        ]
        await _send_whole(send, reply.status, back, body)

    def _count(self, vote: Vote, note: Note) -> None:
        metrics, combined = self._metrics, vote.combined
        note.asked, note.read_tokens, note.written_tokens = vote.asked, vote.read_tokens, vote.written_tokens
        metrics.shifts.inc(vote.asked)
        metrics.tokens.labels("read").inc(vote.read_tokens)
        metrics.tokens.labels("written").inc(vote.written_tokens)
        metrics.unlike.inc(len(vote.unlike_shifts))
        note.failed = sum(one.answer is None for one in vote.replies)
        for one in vote.replies:
            if one.fault:
                metrics.faults.labels(one.fault.code).inc()
        if vote.unlike_shifts:
            say(
                "shifts off",
                logging.WARNING,
                id=note.id,
                shifts=vote.unlike_shifts,
                remedy="give --tokenizer or --unit",
            )
        if combined is None:
            metrics.votes.labels("failed").inc()
            return
        note.agreement, note.shift_tokens = f"{combined.agreeing}/{combined.total}", combined.winner.shift_tokens
        metrics.settled.inc(combined.settled_early)
        agreed = combined.agreeing == combined.total
        metrics.votes.labels("agreed" if agreed else "disagreed").inc()
        if not agreed:
            answers = {one.shift_tokens: one.answer.answer for one in vote.replies if one.answer}
            numbers = {text: number for number, text in enumerate(dict.fromkeys(answers.values()))}
            say(
                "disagreement",
                logging.WARNING,
                id=note.id,
                # Which shifts agree with which, without a word of what they say.
                answer_by_shift={shift: numbers[text] for shift, text in answers.items()},
                answers=list(numbers) if self._settings.log_text else None,
            )

    @contextmanager
    def _room(self, requests: int) -> Iterator[None]:
        """Reserve requests to the server.

        Raises:
            RefusedError: too many are in flight.
        """
        limit = self._settings.concurrency
        if self._in_flight + requests > limit:
            raise RefusedError(
                503, f"more than {limit} requests to the server at once.", "too_busy", [(b"retry-after", b"1")]
            )
        self._in_flight += requests
        self._metrics.in_flight.set(self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= requests
            self._metrics.in_flight.set(self._in_flight)


async def _send_whole(send: Send, status: int, headers: Raw, body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
