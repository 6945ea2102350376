"""A model behind HTTP as a target: vLLM, SGLang, llama.cpp, OpenAI-compatible servers, chat endpoints."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from isophase.errors import IsophaseError
from isophase.probes import Prompt, Tokenizer, has_closed_vocabulary
from isophase.targets.base import REPEAT_EVERY, SERVER_CHOICES, Answer, ServerOptions, TargetDefaults
from isophase.targets.server.connect import ServerFacts, UnreachableError, check_tokens, connect, refusal
from isophase.targets.server.http import RequestFailedError, ServerClient
from isophase.targets.server.judge import failed, judge_ids, judge_text, known_log_probability, misread
from isophase.targets.server.protocols import Chat, Reply
from isophase.targets.server.tokenizer import FileTokenizer, RemoteTokenizer
from isophase.targets.strides import Grid

T = TypeVar("T")

# A fault of the whole service, not of one prompt.
_FATAL = (401, 403, 404)


class Question(NamedTuple):
    """Ids, how many greedy tokens are wanted behind them, and the salt of the cache (None: a fresh one)."""

    ids: Sequence[int]
    tokens: int
    salt: str | None = None


class ServerTarget:
    """Asks a server; several questions at a time, each answer as soon as it is there.

    Args:
        spec: `http://HOST:PORT/v1#MODEL`.
        kind: of the server, or `auto`.
        tokenizer: file, folder or hub id; None: from the model's path, or the server's own route.
        concurrency: most requests in flight, >= 1.
        timeout_seconds: longest time of one request, > 0.

    Raises:
        IsophaseError: for options that cannot work. The server is first asked when something is needed of it.
    """

    grouped = False

    def __init__(
        self,
        spec: str,
        *,
        kind: str = "auto",
        tokenizer: str | None = None,
        concurrency: int = ServerOptions.concurrency,
        timeout_seconds: float = ServerOptions.timeout_seconds,
    ) -> None:
        if kind not in SERVER_CHOICES:
            raise IsophaseError(f"--server {kind!r} is unknown.", f"Give {', '.join(SERVER_CHOICES)}.")
        if concurrency < 1:
            raise IsophaseError(f"--concurrency is {concurrency}; it must be at least 1.", "Give 1 or more.")
        if not timeout_seconds > 0:
            raise IsophaseError(f"--timeout is {timeout_seconds:g} seconds; it must be above 0.", "Give 1 or more.")
        url, _, model = spec.partition("#")
        self.name = spec
        self.concurrency = concurrency
        self._kind, self._given, self._model = kind, tokenizer, model
        self._client = ServerClient(url, timeout_seconds=timeout_seconds)
        self._cached_answers = self._moved = self._counted = 0
        weakref.finalize(self, self._client.close)

    @cached_property
    def facts(self) -> ServerFacts:
        """What the server says about itself.

        Raises:
            IsophaseError: it cannot be used.
        """
        return connect(self._client, self._model, self._kind)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Given a source, it is read without asking the server."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> FileTokenizer | RemoteTokenizer:
        if self._given:
            return FileTokenizer(self._given)
        facts = self.facts
        for place in (facts.model_path, facts.model):
            if place and (Path(place).expanduser() / "tokenizer.json").is_file():
                return FileTokenizer(place)
        try:
            return RemoteTokenizer(self._ask_root, facts.protocol.kind, facts.model)
        except (RequestFailedError, KeyError, TypeError, ValueError, StopIteration):
            pass
        for place in (facts.model_path, facts.model):
            if place.count("/") == 1 and not place.startswith(("/", ".", "~")):
                return FileTokenizer(place)
        raise IsophaseError(
            f"no tokenizer is known for {self.name}: the server offers none.",
            "Give --tokenizer a folder with tokenizer.json, such a file, or a hub id.",
        )

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer came from, for reports without the server; empty: only the server has it."""
        return self._tokenizer.source

    def _ask_root(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post_now(self._client.root_url + route, body)

    @cached_property
    def _added_tokens(self) -> int:
        """Tokens that the server puts around a text; also the check that it reads what it is sent."""
        return check_tokens(self._client, self.facts, self.tokenizer)

    @property
    def grids(self) -> list[Grid]:
        """Fixed grids, where the model's configuration lies on this machine."""
        return self.facts.grids

    @property
    def control_periods(self) -> tuple[int, ...]:
        """Periods of the server rather than the model: the block size of its KV cache."""
        return (self.facts.block_tokens,) if self.facts.block_tokens else ()

    @property
    def readings(self) -> int:
        """How often the server reads each prompt."""
        return 1

    @property
    def max_length_tokens(self) -> int | None:
        """Longest prompt, so that one token of an answer fits behind it."""
        limit = self.facts.max_length_tokens
        if limit is None:
            return None
        slack = Chat.slack_tokens + self._added_tokens if self.facts.protocol.kind == "chat" else 0
        return limit - 1 - slack

    @property
    def defaults(self) -> TargetDefaults:
        """As for pretrained models; prompts are as long as the context allows, up to 2,048 tokens."""
        closed = has_closed_vocabulary(self.tokenizer)
        limit = self.max_length_tokens
        length = 256 if closed else 2048
        return TargetDefaults(length_tokens=min(length, limit or length), demonstrations=0 if closed else 2)

    def fingerprint(self) -> str:
        """Digest of what the server says: kind, model, version, limits, tokenizer."""
        added, facts = self._added_tokens, self.facts
        known = [
            facts.protocol.kind,
            facts.model,
            facts.version,
            facts.max_length_tokens,
            facts.model_path,
            self._tokenizer.digest,
            added,
        ]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest, and notes for the report."""
        facts = self.facts
        return {
            "target": self.name,
            "server": facts.protocol.kind,
            "version": facts.version,
            "model": facts.model,
            "model_path": facts.model_path,
            "fingerprint": self.fingerprint(),
            "tokenizer": self.tokenizer_source or "the server's",
            "sends_ids": facts.protocol.takes_ids,
            "prefix_cache": facts.protocol.cache,
            "block_tokens": facts.block_tokens,
            "concurrency": self.concurrency,
            "notes": self._notes(),
        }

    def _notes(self) -> list[str]:
        """What a reader of the run must know about this server."""
        notes = []
        facts = self.facts
        if not facts.protocol.takes_ids:
            moved = f"; {self._moved:,} of {self._counted:,} prompts had another length there" if self._moved else ""
            notes.append(
                f"Phase unverified: {self.name} takes text, so positions are those of the local tokenizer, "
                f"shifted by its template ({self._added_tokens} tokens){moved}."
            )
        if facts.protocol.kind in ("openai", "chat"):
            notes.append(f"The prefix cache of {self.name} was left as it is: a period may be that of its blocks.")
        if self._cached_answers:
            notes.append(
                f"{self.name} took part of {self._cached_answers:,} prompts from its prefix cache in spite of the "
                "audit's salt: a period may be that of its blocks."
            )
        return notes

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Answers in the order of the prompts; see `stream` for the order in which they come."""
        answers: dict[int, Answer] = {}
        due = 0
        for number, answer in self.stream(prompts):
            answers[number] = answer
            while due in answers:
                yield answers.pop(due)
                due += 1

    def stream(self, prompts: Iterable[Prompt]) -> Generator[tuple[int, Answer], None, None]:
        """Ask with up to `concurrency` requests in flight.

        Args:
            prompts: read only as fast as they are asked.

        Yields:
            Number of the prompt, from 0, and its answer, as they come.

        Raises:
            UnreachableError: the server is gone; what was in flight is lost, nothing else.
            IsophaseError: it refuses access.
        """
        _ = self._added_tokens  # whatever is wrong with the server is found before the first question
        loop = self._client.loop()
        source = enumerate(prompts)
        answered: asyncio.Queue[tuple[int, Answer] | None] = asyncio.Queue()

        async def work() -> None:
            # The next question follows in the same step of the loop: a fast server never waits for this side.
            for number, prompt in source:
                answered.put_nowait((number, await self._answer(prompt)))

        async def work_together() -> None:
            try:
                await asyncio.gather(*workers)
            finally:
                answered.put_nowait(None)

        workers = [loop.create_task(work()) for _ in range(self.concurrency)]
        whole = loop.create_task(work_together())
        try:
            # Answers before faults: a fault ends the run.
            while (answer := _next_of(answered, loop)) is not None:
                yield answer
            whole.result()
        except KeyboardInterrupt:
            while not answered.empty():  # what came in the same moment need not be asked again
                if (answer := answered.get_nowait()) is not None:
                    yield answer
            raise
        finally:
            for task in workers:
                task.cancel()
            loop.run_until_complete(asyncio.gather(whole, *workers, return_exceptions=True))

    async def _answer(self, prompt: Prompt) -> Answer:
        """Answer of one prompt; what concerns this prompt alone becomes an `error`."""
        try:
            answer = await self._ask(prompt)
            if _is_repeated(prompt):
                second, same = await self._ask_again(prompt), ("status", "correct", "output_ids")
                answer = replace(answer, repeat_agrees=all(getattr(answer, n) == getattr(second, n) for n in same))
            return answer
        except RequestFailedError as error:
            if error.status in _FATAL:
                raise refusal(error, self._client.base_url) from error
            if error.no_reply:
                await self._check_alive(error)
            return failed(error.reason)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            return failed(f"the reply is not that of a {self.facts.protocol.kind} server: {error or 'wrong shape'}")

    async def _check_alive(self, error: RequestFailedError) -> None:
        """Tell a prompt that the server cannot answer from a server that is gone."""
        try:
            await self._client.get("/models", attempts=2)
        except RequestFailedError as second:
            if second.no_reply:
                raise UnreachableError(
                    f"{self._client.base_url} stopped answering ({error.reason}).",
                    "Start it again and repeat the command: the run resumes.",
                ) from error

    def replies(self, questions: Sequence[Question], concurrency: int = 1) -> list[Reply]:
        """Replies as they are, for checks of the server itself.

        Args:
            questions: in the order in which they are asked.
            concurrency: most requests in flight.

        Raises:
            RequestFailedError: one of them failed.
            KeyError, TypeError, ValueError, IndexError: a reply is not of this kind of server.
        """
        turn = asyncio.Semaphore(concurrency)

        async def one(question: Question) -> Reply:
            async with turn:
                return await self._reply(list(question.ids), question.tokens, question.salt or _salt())

        async def every() -> list[Reply]:
            return await asyncio.gather(*map(one, questions))

        _ = self._added_tokens
        return self._client.run(every())

    async def _reply(self, ids: list[int], tokens: int, salt: str) -> Reply:
        protocol = self.facts.protocol
        # The server puts its own start-of-text before a text.
        question = ids if protocol.takes_ids else self.tokenizer.decode(ids[len(self.tokenizer.prefix_ids) :])
        url = protocol.url(self._client.base_url, self._client.root_url)
        return protocol.read(await self._client.post(url, protocol.question(question, tokens, salt)))

    async def _generate(self, prompt: Prompt) -> Reply:
        protocol = self.facts.protocol
        ids: list[int] = prompt.ids.tolist()
        reply = await self._reply(ids, len(prompt.answer_ids), _salt())
        self._cached_answers += reply.cached_tokens > 0 and protocol.kind not in ("openai", "chat")
        if not protocol.takes_ids and reply.prompt_tokens is not None:
            self._counted += 1
            expected = len(prompt.ids) - len(self.tokenizer.prefix_ids) + self._added_tokens
            self._moved += reply.prompt_tokens != expected
        elif protocol.takes_ids and (difference := misread(ids, reply)):
            raise RequestFailedError(difference)
        return reply

    def _judge(self, prompt: Prompt, reply: Reply) -> Answer:
        judge = judge_text if self.facts.protocol.kind == "chat" else judge_ids
        return judge(prompt, reply, self.tokenizer)

    async def _ask(self, prompt: Prompt) -> Answer:
        reply = await self._generate(prompt)
        answer = self._judge(prompt, reply)
        if answer.status == "truncated":
            return answer
        log_probability, *choices = [
            await self._log_probability(prompt, ids, answer, reply) for ids in (prompt.answer_ids, *prompt.choices)
        ]
        known = all(map(math.isfinite, (log_probability, *choices)))
        return replace(
            answer, log_probability=log_probability, choice_log_probabilities=tuple(choices) if known else ()
        )

    async def _ask_again(self, prompt: Prompt) -> Answer:
        """The same question once more, as far as a flip can be seen."""
        return self._judge(prompt, await self._generate(prompt))

    async def _log_probability(self, prompt: Prompt, ids: tuple[int, ...], answer: Answer, reply: Reply) -> float:
        """From the alternatives that came along; where they end, from a request of its own."""
        known = known_log_probability(ids, answer.output_ids, reply, self.tokenizer)
        protocol = self.facts.protocol
        body = protocol.scoring(prompt.ids.tolist(), ids, _salt()) if math.isnan(known) else None
        if body is None:
            return known
        url = protocol.url(self._client.base_url, self._client.root_url)
        try:
            return protocol.read_score(await self._client.post(url, body), ids)
        except (RequestFailedError, KeyError, TypeError, ValueError, IndexError):
            return math.nan  # the answer itself is there


def _next_of(queue: asyncio.Queue[T], loop: asyncio.AbstractEventLoop) -> T:
    """What comes next; the loop runs only where nothing is there."""
    return loop.run_until_complete(queue.get()) if queue.empty() else queue.get_nowait()


def _salt() -> str:
    """A string that no other request has, so that no cache holds a part of its prompt."""
    return secrets.token_hex(16)


def _is_repeated(prompt: Prompt) -> bool:
    digest = hashlib.blake2b(b"repeat" + prompt.ids.tobytes(), digest_size=4).digest()
    return int.from_bytes(digest) % REPEAT_EVERY == 0
