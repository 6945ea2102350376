"""A server that answers by a phase vote, so that an audit measures the remedy: one answer for each shift, combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import cast

import numpy as np

from isophase.errors import IsophaseError
from isophase.mitigate.vote.lanes import Lanes
from isophase.mitigate.vote.rules import Rule, ShiftAnswer, combine
from isophase.mitigate.vote.shifts import DEFAULT_UNIT, NeutralTexts, choose_shifts, neutral_ids
from isophase.probes import Prompt
from isophase.targets import Answer, ServerOptions
from isophase.targets.server import Reply, ServerTarget, failed

_SCORED_RULE: Rule = "mean-probability"


class VotedServerTarget(Lanes, ServerTarget):
    """Asks every prompt at every shift, one after another, and answers by the vote.

    A vote needs what each answer has at every shift. It is taken from the alternatives that come with an answer, else
    from teacher forcing where the server can score a continuation (vLLM, SGLang); what stays unknown gets the most that
    it can have (`isophase.mitigate.vote.rules`). Without log-probabilities the majority of answers decides.

    The log-probability that is reported is that of the right answer: its mean over the shifts for
    `mean-log-probability`, for all other rules the logarithm of its mean probability.

    Args:
        spec: of the server, without the vote.
        name: spec of this target.
        shifts: numbers of neutral tokens behind start-of-text, the first one 0; or one number: so many shifts, spread
            over the strides that the model's configuration names, else over as many tokens.
        rule: as in `isophase.mitigate.vote.rules.combine`; None: mean probability where the server gives
            log-probabilities, else majority.
        options: how the server is treated.
    """

    def __init__(
        self, spec: str, *, name: str, shifts: Sequence[int], rule: Rule | None, options: ServerOptions
    ) -> None:
        super().__init__(spec, **asdict(options))
        self.name = name
        self.rule = rule
        self._wanted = tuple(shifts)
        self._unscored = 0

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """Neutral tokens of each shift."""
        if len(self._wanted) > 1:
            return self._wanted
        strides = [grid.stride_tokens for grid in self.grids if grid.kind == "payload"]
        return choose_shifts(strides or self._wanted, self._wanted[0])

    @property
    def readings(self) -> int:
        """Each prompt is read at every shift."""
        return len(self.shifts)

    def rule_in_words(self) -> str:
        """The rule that is used: what it was told, else what the server's answers allow."""
        if self.rule is not None:
            return str(self.rule)
        return "majority" if self.facts.protocol.kind == "chat" else _SCORED_RULE

    def _notes(self) -> list[str]:
        notes = super()._notes()
        if self._unscored:
            notes.append(
                f"{self.name} gave no log-probability of an answer to {self._unscored:,} prompts: there the majority "
                "of the shifts decided."
            )
        return notes

    @cached_property
    def _added_tokens(self) -> int:
        added = super()._added_tokens
        if self.facts.protocol.kind == "chat" and self.rule not in (None, "majority"):
            raise IsophaseError(
                f"the rule {self.rule} needs log-probabilities, and a chat endpoint gives none here.",
                "Vote by majority, or ask the server's completions.",
            )
        return added

    @cached_property
    def _neutral(self) -> list[int]:
        return neutral_ids(self.tokenizer)

    @cached_property
    def _neutral_texts(self) -> NeutralTexts:
        word = self.tokenizer.decode(self._neutral).strip()
        return NeutralTexts(self.tokenizer, f"{word} " if word else DEFAULT_UNIT)

    def _moved_by(self, shift: int, prompt: Prompt) -> Prompt:
        """The prompt with so many neutral tokens behind start-of-text, as ids or as a text of so many tokens."""
        if shift == 0:
            return prompt
        prefix = list(self.tokenizer.prefix_ids)
        if self.facts.protocol.takes_ids:
            neutral = np.resize(np.asarray(self._neutral, dtype=np.int32), shift)
            ids = np.concatenate([prompt.ids[: len(prefix)], neutral, prompt.ids[len(prefix) :]])
        else:
            text = self.tokenizer.decode(prompt.ids[len(prefix) :].tolist())
            ids = np.array([*prefix, *self.tokenizer.encode(self._neutral_texts.text(shift, text) + text)])
        return replace(prompt, ids=ids.astype(np.int32), position_tokens=prompt.position_tokens + shift)

    async def _ask(self, prompt: Prompt) -> Answer:
        lanes = [self._moved_by(shift, prompt) for shift in self.shifts]
        replies = [await self._generate(lane) for lane in lanes]
        given = [self._judge(lane, reply) for lane, reply in zip(lanes, replies, strict=True)]
        rivals = dict.fromkeys([*(answer.output_ids for answer in given), prompt.answer_ids, *prompt.choices])
        table = [
            {ids: await self._of_answer(lane, ids, answer, reply) for ids in rivals}
            for lane, answer, reply in zip(lanes, given, replies, strict=True)
        ]
        rule = self.rule or cast(Rule, self.rule_in_words())
        if rule != "majority" and any(math.isnan(row[one.output_ids]) for row, one in zip(table, given, strict=True)):
            if self.rule is not None:
                return failed(f"the rule {rule} needs log-probabilities, and the server gave none of its own answer")
            self._unscored += 1
            rule = "majority"
        votes = [
            ShiftAnswer(
                shift_tokens=shift,
                answer=self._name(answer, reply),
                log_probability=None if math.isnan(row[answer.output_ids]) else row[answer.output_ids],
                choices={str(ids): value for ids, value in row.items() if not math.isnan(value)},
            )
            for shift, answer, reply, row in zip(self.shifts, given, replies, table, strict=True)
        ]
        winner = self.shifts.index(combine(votes, rule).winner.shift_tokens)
        right, *choices = [_mean([row[ids] for row in table], rule) for ids in (prompt.answer_ids, *prompt.choices)]
        known = all(map(math.isfinite, (right, *choices)))
        return replace(given[winner], log_probability=right, choice_log_probabilities=tuple(choices) if known else ())

    async def _ask_again(self, prompt: Prompt) -> Answer:
        return await self._ask(prompt)

    async def _of_answer(self, lane: Prompt, ids: tuple[int, ...], answer: Answer, reply: Reply) -> float:
        """Log-probability of a possible answer at one shift; nan where unknown, as that of no answer is."""
        value = await self._log_probability(lane, ids, answer, reply) if ids else math.nan
        return 0.0 if value > 0 else value

    def _name(self, answer: Answer, reply: Reply) -> str:
        """What answers are compared by: tokens, or the whole text of a chat reply, as the proxy compares it."""
        return reply.text.strip() if self.facts.protocol.kind == "chat" else str(answer.output_ids)


def _mean(values: Sequence[float], rule: Rule) -> float:
    """Of the log-probabilities of one answer at all shifts; nan where one is unknown."""
    if any(map(math.isnan, values)):
        return math.nan
    if rule == "mean-log-probability":
        return math.fsum(values) / len(values)
    return float(np.logaddexp.reduce(values) - math.log(len(values)))
