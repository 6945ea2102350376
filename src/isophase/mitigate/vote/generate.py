"""Phase voting for local models: one prompt at several shifts, one answer, token by token.

A *lane* is the prompt with some neutral tokens inserted. All lanes get the tokens that are generated, so they
differ in nothing but the phases of what stands behind the insertion. At every step the lanes' next-token
distributions are combined.

Legend: S lanes, B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from isophase.mitigate.vote.rules import RULES
from isophase.models import cache_argument, cache_of

__all__ = ["PhaseVote", "VoteCost", "combine_logits", "insert_neutral", "is_settled"]


def combine_logits(logits_SBV: torch.Tensor, rule: str) -> torch.Tensor:
    """Combine the next-token distributions of several lanes.

    Args:
        logits_SBV: logits or log-probabilities, the unshifted lane first.
        rule: `majority`: the token that most lanes prefer, between equals the one with the larger mean probability;
            `confidence`: mean probability, each lane weighted by the probability of the token that it prefers;
            `mean-log-probability`, `mean-probability`.

    Returns:
        Log-probabilities [B, V], normalised, float32 or wider. Of `majority`: of a mixture of the votes and, by less
        than one vote, the mean probability.

    Raises:
        ValueError: for an unknown rule.
    """
    log_p_SBV = torch.log_softmax(logits_SBV.float() if logits_SBV.dtype.itemsize < 4 else logits_SBV, dim=-1)
    if rule == "mean-log-probability":
        return torch.log_softmax(log_p_SBV.mean(dim=0), dim=-1)
    if rule == "mean-probability":
        return _log_mean(log_p_SBV)
    if rule == "confidence":
        weight_SB1 = log_p_SBV.amax(dim=-1, keepdim=True)
        return torch.log_softmax(torch.logsumexp(log_p_SBV + weight_SB1, dim=0), dim=-1)
    if rule == "majority":
        votes_BV = torch.nn.functional.one_hot(log_p_SBV.argmax(dim=-1), log_p_SBV.shape[-1]).sum(dim=0)
        return torch.log_softmax(torch.log(votes_BV + 0.5 * _log_mean(log_p_SBV).exp()), dim=-1)
    raise ValueError(f"rule {rule!r} is unknown; it is one of {', '.join(RULES)}")


def _log_mean(log_p_SBV: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(log_p_SBV, dim=0) - torch.log(torch.tensor(float(len(log_p_SBV))))


def is_settled(logits_SBV: torch.Tensor, missing: int, rule: str) -> bool:
    """Whether the most likely token of every row stays, whatever the missing lanes say.

    A lane gives a token between nothing and everything, so what leads by more than one for each missing lane
    has won. Under `mean-log-probability` one lane can rule out anything: only a complete vote is settled.

    Args:
        logits_SBV: of the lanes that have spoken.
        missing: lanes that have not.
        rule: as in `combine_logits`.
    """
    if missing == 0:
        return True
    if rule == "mean-log-probability" or not len(logits_SBV):
        return False
    p_SBV = torch.softmax(logits_SBV.float(), dim=-1)
    if rule == "majority":
        score_BV = torch.nn.functional.one_hot(p_SBV.argmax(dim=-1), p_SBV.shape[-1]).sum(dim=0).float()
    elif rule == "confidence":
        score_BV = (p_SBV * p_SBV.amax(dim=-1, keepdim=True)).sum(dim=0)
    else:
        score_BV = p_SBV.sum(dim=0)
    first, second = score_BV.topk(2, dim=-1).values.unbind(dim=-1)
    return bool((first - second > missing).all())


def insert_neutral(ids_BT: torch.Tensor, shift_tokens: int, at: int, neutral_ids: Sequence[int]) -> torch.Tensor:
    """Insert `shift_tokens` neutral tokens before token `at` of every row, [B, T + shift].

    Args:
        ids_BT: prompts.
        shift_tokens: at least 0.
        at: position, 0..T; what stands before it keeps its phase, and a server's prefix cache.
        neutral_ids: repeated from their beginning as often as needed.
    """
    cycle = torch.tensor([neutral_ids[n % len(neutral_ids)] for n in range(shift_tokens)], dtype=ids_BT.dtype)
    filler = cycle.to(ids_BT.device).expand(len(ids_BT), -1)
    return torch.cat([ids_BT[:, :at], filler, ids_BT[:, at:]], dim=1)


@dataclass(kw_only=True)
class VoteCost:
    """What a vote cost, beside the unshifted generation.

    Attributes:
        lanes: lanes of the vote, the unshifted one included.
        prompt_tokens: tokens of prompts that other lanes read.
        decoded_tokens: generated tokens that other lanes read.
        steps: tokens voted on.
        lane_steps: how often another lane was asked; less than `steps` times the other lanes where votes were
            settled early.
    """

    lanes: int
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    steps: int = 0
    lane_steps: int = 0

    def __str__(self) -> str:
        asked = self.lane_steps / max(1, self.steps) + 1
        return (
            f"{self.lanes} shifts: {self.prompt_tokens:,} more prompt tokens, {self.decoded_tokens:,} more decoded; "
            f"{asked:.1f} shifts asked for each of {self.steps:,} tokens"
        )


class PhaseVote:
    """Generates by a vote over shifts.

    Works with what `generate` of the model can do: greedy, sampling, beams, several sequences, streamers, stopping
    criteria; not with assisted generation, which would have to take lanes back.

    Args:
        model: any transformers causal language model with a cache.
        shifts: neutral tokens of each lane, the first one 0; see `isophase.mitigate.vote.shifts.choose_shifts`.
        neutral_ids: token ids that mean nothing, such as a line break.
        rule: how lanes are combined, as in `combine_logits`.
        early_stop: leave out lanes that cannot change the most likely token any more. They read what they missed
            when they are needed again, so greedy results stay the same. Sampling needs all lanes.

    Raises:
        ValueError: for shifts that do not begin with 0, come twice or are negative, no neutral ids, or an unknown
            rule.

    Attributes:
        cost: of the latest `generate`.

    Source: cycle spinning (Coifman and Donoho, 1995), over the phases of Zhu et al., arXiv 2609.36322.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shifts: Sequence[int],
        neutral_ids: Sequence[int],
        *,
        rule: str = "mean-probability",
        early_stop: bool = True,
    ) -> None:
        if not shifts or shifts[0] != 0 or len(set(shifts)) < len(shifts) or min(shifts) < 0:
            raise ValueError(f"shifts {tuple(shifts)} must begin with 0, be different and not negative")
        if not neutral_ids:
            raise ValueError("a vote needs at least one neutral token id")
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is unknown; it is one of {', '.join(RULES)}")
        self.model = model
        self.shifts, self.neutral_ids = tuple(shifts), tuple(neutral_ids)
        self.rule, self.early_stop = rule, early_stop
        self.cost = VoteCost(lanes=len(self.shifts))

    def generate(self, input_ids: torch.Tensor, *, at: int = 0, **kwargs: Any) -> Any:
        """As the model's `generate`, by a vote.

        Args:
            input_ids: [B, T], prompts without padding.
            at: where neutral tokens are inserted: behind the system prompt, say. 0..T.
            **kwargs: of `generate`.

        Returns:
            What `generate` returns; sequences hold the prompt as it is, without neutral tokens.

        Raises:
            ValueError: for padded prompts or a position outside them.
        """
        processors = [*(kwargs.pop("logits_processor", None) or []), self.processor(input_ids, at, **kwargs)]
        return self.model.generate(input_ids, logits_processor=LogitsProcessorList(processors), **kwargs)

    def processor(self, input_ids: torch.Tensor, at: int = 0, **kwargs: Any) -> LogitsProcessor:
        """What puts the vote into a `generate` of one's own; arguments as of `generate`."""
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise ValueError("a vote shifts whole prompts; give prompts of equal length, without padding")
        if not 0 <= at <= input_ids.shape[1]:
            raise ValueError(f"at={at} is outside the prompt of {input_ids.shape[1]} tokens")
        self.cost = VoteCost(lanes=len(self.shifts))
        sampled = bool(kwargs.get("do_sample")) or (kwargs.get("num_beams") or 1) > 1
        return _Processor(self, at, stop_early=self.early_stop and not sampled)


class _Lane:
    """The prompt at one shift, and the model's memory of it."""

    def __init__(self, vote: PhaseVote, shift_tokens: int) -> None:
        self._vote, self._shift = vote, shift_tokens
        self._cache: Any = None
        self._pending: torch.Tensor | None = None

    def add(self, ids_BT: torch.Tensor, at: int | None) -> None:
        """Take tokens, to be read when the lane is next asked; the prompt first, with `at`."""
        if at is not None:
            self._pending = insert_neutral(ids_BT, self._shift, at, self._vote.neutral_ids)
        else:
            self._pending = ids_BT if self._pending is None else torch.cat([self._pending, ids_BT], dim=1)

    def logits(self) -> torch.Tensor:
        """Read what was added; logits of the next token, [B, V]."""
        assert self._pending is not None
        ids, self._pending = self._pending, None
        cost = self._vote.cost
        if self._cache is None:
            cost.prompt_tokens += ids.numel()
            # Rows that `generate` repeats for beams or samples are read once.
            ids, place = torch.unique(ids, dim=0, return_inverse=True)
        else:
            cost.decoded_tokens += ids.numel()
            place = None
        cost.lane_steps += 1
        with torch.no_grad():
            out = self._vote.model(ids, use_cache=True, logits_to_keep=1, **cache_argument(self._cache))
        first, self._cache = self._cache is None, cache_of(out)
        logits: torch.Tensor = out.logits[:, -1]
        if first and place is not None and not torch.equal(place, torch.arange(len(ids), device=ids.device)):
            self._cache.reorder_cache(place)
            logits = logits[place]
        return logits

    def reorder(self, rows: torch.Tensor) -> None:
        """Follow beams."""
        if self._cache is not None:
            self._cache.reorder_cache(rows)
        if self._pending is not None:
            self._pending = self._pending[rows]


class _Processor(LogitsProcessor):  # type: ignore[misc]
    """Replaces the unshifted lane's scores by the vote's."""

    def __init__(self, vote: PhaseVote, at: int, *, stop_early: bool) -> None:
        self._vote, self._at, self._stop_early = vote, at, stop_early
        self._lanes = [_Lane(vote, shift) for shift in vote.shifts[1:]]
        self._seen: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        self._follow(input_ids)
        rule, said = self._vote.rule, [scores.float()]
        self._vote.cost.steps += 1
        for number, lane in enumerate(self._lanes):
            if self._stop_early and is_settled(torch.stack(said), len(self._lanes) - number, rule):
                break
            said.append(lane.logits().to(scores.device).float())
        return combine_logits(torch.stack(said), rule).to(scores.dtype)

    def _follow(self, input_ids: torch.Tensor) -> None:
        """Give the lanes the tokens that are new."""
        if self._seen is None:
            for lane in self._lanes:
                lane.add(input_ids, self._at)
        else:
            known = self._seen.shape[1]
            if input_ids.shape[1] <= known:
                raise ValueError("a vote cannot take tokens back: use it without assisted generation")
            rows = _rows_of(input_ids[:, :known], self._seen)
            for lane in self._lanes:
                if rows is not None:
                    lane.reorder(rows)
                lane.add(input_ids[:, known:], None)
        self._seen = input_ids


def _rows_of(now_BT: torch.Tensor, before_BT: torch.Tensor) -> torch.Tensor | None:
    """Which earlier row each row continues; None where none has moved."""
    if now_BT.shape == before_BT.shape and torch.equal(now_BT, before_BT):
        return None
    same = (now_BT[:, None] == before_BT[None]).all(dim=-1)
    if not bool(same.any(dim=1).all()):
        raise ValueError("a vote cannot follow: generated tokens were changed")
    return same.long().argmax(dim=1)
