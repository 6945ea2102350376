"""The invariants of a server, measured on its replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from isophase.probes import FILLER, has_closed_vocabulary, prose_ids, single_token_words
from isophase.targets.invariants.outcome import Case, InvariantOutcome, NotTestableError, judge, residues_to_try
from isophase.targets.server.http import RequestFailedError
from isophase.targets.server.protocols import Reply
from isophase.targets.server.target import Question, ServerTarget

# Difference in log-probability of a likely token that a server's batching and precision (bfloat16 as a rule) may
# make; state that leaks or is lost makes more.
_LIMIT = 0.3
_FLOOR_FACTOR = 4.0
_UNLIKELY = -5.0
_WITHOUT_GRID_TOKENS = 8
_PROMPTS = 8
_TOKENS = 4
_MOST_STRIDE = 16

_EXPLAINED = {
    "determinism floor": "Equal requests get different answers: no difference below that can be trusted.",
    "order": "An answer depends on the requests before it: state leaks between requests.",
    "concurrency": "An answer depends on the requests beside it: ask one at a time (--concurrency 1), or switch the "
    "server's batch-invariant mode on.",
    "decode against prefill": "Generated tokens see another context than the same tokens read at once: what looks like "
    "a weak phase may be where decoding began.",
    "short prompt after another request": "State of an earlier request leaks into the next one.",
    "warm against cold prefix": "A prompt whose beginning is cached is answered otherwise: switch prefix caching off "
    "or salt every request, as audits do.",
}
_CLOSED = {
    "prefill split": "a server cuts prompts where it likes; `isophase invariants hf:MODEL` tries every cut",
    "rollback": "no route cuts a server's cache back",
    "beam reorder": "no route reorders a server's rows",
    "right padding": "a server pads by itself, if at all; `concurrency` tries prompts of different lengths at once",
    "left padding": "a server pads by itself, if at all; `concurrency` tries prompts of different lengths at once",
    "visibility": "needs the logits inside a prompt",
}


class ServerInvariants:
    """Checks of one server.

    Args:
        target: the server.
        stride_tokens: S; None: the longest that the configuration names, else 8. Of a long one 16 tokens count.
        seed: of the prompts.
    """

    def __init__(self, target: ServerTarget, *, stride_tokens: int | None = None, seed: int = 0) -> None:
        self.target = target
        grids = [g.stride_tokens for g in target.grids]
        self.stride = stride_tokens or max(grids, default=_WITHOUT_GRID_TOKENS)
        closed = has_closed_vocabulary(target.tokenizer)
        self._text = single_token_words(target.tokenizer, FILLER) if closed else prose_ids(target.tokenizer)
        self._rng = np.random.default_rng([seed, 19])
        self.length = 3 * self.stride
        limit = target.max_length_tokens
        if limit is not None:
            self.length = min(self.length, limit - self.stride - _TOKENS)
        self.limit = _LIMIT
        self.prompts = [self._prompt(self.length + n % self.stride) for n in range(_PROMPTS)]

    def run(self, say: Callable[[str], None] = lambda _: None) -> list[InvariantOutcome]:
        """All checks, the determinism floor first: it raises the limit of the others where it must."""
        say("determinism floor")
        outcomes = [self.determinism()]
        floor = outcomes[0].largest_difference
        if math.isfinite(floor):
            self.limit = max(self.limit, _FLOOR_FACTOR * floor)
        for check in (self.order, self.concurrency, self.decode, self.short_after_another, self.warm_prefix):
            say(check.__name__.replace("_", " "))
            outcomes.append(check())
        return outcomes + [
            InvariantOutcome(name=name, status="not testable", detail=why) for name, why in _CLOSED.items()
        ]

    def _prompt(self, tokens: int) -> list[int]:
        start = int(self._rng.integers(len(self._text)))
        filler = np.take(self._text, start + np.arange(tokens), mode="wrap").tolist()
        return [*self.target.tokenizer.prefix_ids, *filler][:tokens]

    def _ask(self, questions: Sequence[Question], concurrency: int = 1) -> list[Reply]:
        try:
            return self.target.replies(questions, concurrency)
        except (RequestFailedError, KeyError) as error:
            raise RuntimeError(f"the server gives no answer ({error})") from error

    def _judge(self, name: str, detail: str, cases: Iterator[Case]) -> InvariantOutcome:
        return judge(name, detail, cases, self.limit, _EXPLAINED[name])

    def _ids_only(self) -> None:
        if not self.target.facts.protocol.takes_ids:
            raise NotTestableError("the server takes text, and a text cut elsewhere has other tokens")

    def determinism(self) -> InvariantOutcome:
        """The same request five times; the first follows another one, which is the check of the order."""

        def cases() -> Iterator[Case]:
            for prompt in self.prompts[:4]:
                asked = [Question(prompt, _TOKENS)] * 5
                yield Case(f"a prompt of {len(prompt)} tokens", partial(self._spread, asked))

        return self._judge("determinism floor", "the same prompts, five times in a row, the first not counted", cases())

    def _spread(self, asked: Sequence[Question]) -> float:
        _, second, *rest = self._ask(asked)
        return max(reply_gap(second, other) for other in rest)

    def order(self) -> InvariantOutcome:
        """Prompts forwards and backwards."""

        def cases() -> Iterator[Case]:
            asked = [Question(prompt, _TOKENS) for prompt in self.prompts]
            yield Case(f"{len(asked)} prompts in reverse order", lambda: self._reversed(asked))

        return self._judge("order", "one at a time, forwards against backwards", cases())

    def _reversed(self, asked: Sequence[Question]) -> float:
        forwards, backwards = self._ask(asked), self._ask(asked[::-1])[::-1]
        return max(map(reply_gap, forwards, backwards))

    def concurrency(self) -> InvariantOutcome:
        """Prompts alone and all at once."""

        def cases() -> Iterator[Case]:
            alone = self._ask([Question(prompt, _TOKENS) for prompt in self.prompts])
            for width in (2, 4, _PROMPTS):
                asked = [Question(prompt, _TOKENS) for prompt in self.prompts[:width]]
                yield Case(f"{width} requests at once", partial(self._at_once, alone, asked))

        return self._judge("concurrency", "all at once against one at a time", cases())

    def _at_once(self, alone: Sequence[Reply], asked: Sequence[Question]) -> float:
        return max(map(reply_gap, alone, self._ask(asked, len(asked))))

    def decode(self) -> InvariantOutcome:
        """Generated tokens against the same tokens sent as a prompt."""

        def cases() -> Iterator[Case]:
            self._ids_only()
            for residue in residues_to_try(self.stride):
                prompt = self._prompt(self.length + residue)
                yield Case(f"decoding from token {len(prompt)}", partial(self._decoded, prompt))

        return self._judge(
            "decode against prefill", f"tokens generated from every residue mod {self.stride} against prefills", cases()
        )

    def _decoded(self, prompt: list[int]) -> float:
        steps = min(self.stride, _MOST_STRIDE) + 1
        (whole,) = self._ask([Question(prompt, steps)])
        if whole.output_ids is None:
            raise NotTestableError("the server does not say which tokens it generated")
        said = list(whole.output_ids)
        largest = 0.0
        for n, reply in enumerate(self._ask([Question([*prompt, *said[:n]], 1) for n in range(1, len(said))]), start=1):
            decoded = Reply(output_ids=tuple(said[n : n + 1]), alternatives=whole.alternatives[n : n + 1])
            largest = max(largest, reply_gap(decoded, reply))
        return largest

    def short_after_another(self) -> InvariantOutcome:
        """Prompts of 1..S tokens after one request and after another."""

        def cases() -> Iterator[Case]:
            self._ids_only()
            for tokens in range(1, min(self.stride, _MOST_STRIDE) + 2):
                short = self._prompt(max(tokens, len(self.target.tokenizer.prefix_ids) + 1))[:tokens]
                yield Case(f"a prompt of {tokens} tokens", partial(self._after, short))

        return self._judge("short prompt after another request", "after two different requests", cases())

    def _after(self, short: list[int]) -> float:
        first, second = self.prompts[0], self.prompts[1]
        asked = [Question(ids, _TOKENS) for ids in (first, short, second, short)]
        _, after_first, _, after_second = self._ask(asked)
        return reply_gap(after_first, after_second)

    def warm_prefix(self) -> InvariantOutcome:
        """A prompt whose beginning was asked before under the same salt, against a cold one."""

        def cases() -> Iterator[Case]:
            if self.target.facts.protocol.kind not in ("vllm", "sglang"):
                raise NotTestableError(f"the prefix cache: {self.target.facts.protocol.cache}")
            # Whole blocks must be shared, or nothing is cached.
            block = self.target.facts.block_tokens or 1
            for residue in residues_to_try(self.stride):
                prompt = self._prompt(self.length + 2 * block + residue)
                cut = len(prompt) - self.stride
                if self._fits(prompt):
                    yield Case(f"a prefix of {cut} tokens", partial(self._warm, prompt, cut))

        return self._judge("warm against cold prefix", "a cached prefix against a fresh salt", cases())

    def _fits(self, prompt: Sequence[int]) -> bool:
        limit = self.target.max_length_tokens
        return limit is None or len(prompt) + _TOKENS <= limit

    def _warm(self, prompt: list[int], cut: int) -> float:
        salt = f"isophase-invariants-{self._rng.integers(1 << 62)}"
        asked = [Question(prompt[:cut], 1, salt), Question(prompt, _TOKENS, salt), Question(prompt, _TOKENS)]
        _, warm, cold = self._ask(asked)
        return reply_gap(warm, cold)


def reply_gap(first: Reply, second: Reply) -> float:
    """How far two replies to the same prompt are apart.

    Returns:
        Largest difference in log-probability of likely tokens, up to the place where the outputs part (there
        included). Without log-probabilities: 0 for equal outputs, else 1.
    """
    if not first.alternatives or not second.alternatives:
        one, other = (
            (first.output_ids, second.output_ids) if first.output_ids is not None else (first.text, second.text)
        )
        return float(one != other)
    largest = 0.0
    for place, (mine, yours) in enumerate(zip(first.alternatives, second.alternatives, strict=False)):
        for token in {*mine, *yours}:
            a, b = mine.get(token, _at_most(mine)), yours.get(token, _at_most(yours))
            if max(a, b) > _UNLIKELY:
                largest = max(largest, abs(a - b))
        if _at(first, place) != _at(second, place):
            break
    return largest


def _at_most(listed: Mapping[int | str, float]) -> float:
    """Highest log-probability of a token that is not listed: below all that are, and what they leave over."""
    left = 1.0 - sum(map(math.exp, listed.values()))
    return min(min(listed.values(), default=0.0), math.log(max(left, 1e-9)))


def _at(reply: Reply, place: int) -> int | str | None:
    if reply.output_ids is not None:
        return reply.output_ids[place] if place < len(reply.output_ids) else None
    return max(reply.alternatives[place], key=lambda token: reply.alternatives[place][token])
