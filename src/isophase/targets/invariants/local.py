"""The invariants of a model in this process, measured on its logits.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from isophase.models import cache_argument, cache_of
from isophase.targets.huggingface import HuggingFaceTarget
from isophase.targets.invariants.outcome import Case, InvariantOutcome, NotTestableError, judge, residues_to_try

# Largest difference in log-probability that still counts as rounding, by precision: a wrong or lost entry moves
# some likely token by more, in float32 by three orders of magnitude.
_LIMITS = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 5e-1}
# Tokens less likely than this move with every rounding and decide nothing.
_UNLIKELY = -10.0
_FLOOR_FACTOR = 4.0
_LAPS = 3
_WITHOUT_GRID_TOKENS = 8

_EXPLAINED = {
    "prefill split": "State between two parts of a prefill is lost or misplaced: answers then depend on where a server "
    "cuts a long prompt. Serve with one-shot prefill until it is mended.",
    "decode against prefill": "Generated tokens see another context than the same tokens read at once: what looks like "
    "a weak phase may be where decoding began.",
    "short prompt after another request": "State of an earlier request leaks into the next one.",
    "warm against cold prefix": "A cache that is continued twice is shared where it should be copied.",
    "rollback": "A cropped cache still holds what was cut: speculative decoding and whatever else cuts it back would "
    "get other answers, and no error. (transformers refuses assisted generation for stateful models.)",
    "beam reorder": "Compressor state does not follow its row when rows are reordered.",
    "batch-mates": "A row's answer depends on the rows beside it.",
    "right padding": "Pads behind a prompt reach its entries.",
    "left padding": "Pads in front of a prompt are pooled into its entries and move its phase. Never pad on the left; "
    "isophase never does.",
    "visibility": "A query reads an entry before the entry is complete, or a token behind itself.",
    "determinism floor": "Equal inputs give different logits: no difference below that can be trusted.",
}


class LocalInvariants:
    """Checks of one model.

    Args:
        target: the model.
        stride_tokens: S; None: the longest that the configuration names, else 8.
        seed: of the random prompts.
    """

    def __init__(self, target: HuggingFaceTarget, *, stride_tokens: int | None = None, seed: int = 0) -> None:
        self.target = target
        self.model = target.model
        grids = [g.stride_tokens for g in target.grids]
        self.stride = stride_tokens or max(grids, default=_WITHOUT_GRID_TOKENS)
        self.length = max(_LAPS * self.stride + 3, 27)
        limit = target.max_length_tokens
        if limit is not None:
            self.length = min(self.length, limit)
        rng = np.random.default_rng([seed, 17])
        words = int(self.model.get_input_embeddings().num_embeddings)
        self.a_1T, self.b_1T = (
            torch.from_numpy(rng.integers(3, words, size=(1, self.length))).to(target.device) for _ in range(2)
        )
        self.limit = _LIMITS.get(self.model.dtype, 2e-3)

    def run(self, say: Callable[[str], None] = lambda _: None) -> list[InvariantOutcome]:
        """All checks, the determinism floor first: it raises the limit of the others where it must."""
        checks = [
            self.visibility,
            self.prefill_split,
            self.decode,
            self.short_after_another,
            self.warm_prefix,
            self.rollback,
            self.beam_reorder,
            self.batch_mates,
            self.right_padding,
            self.left_padding,
        ]
        with torch.inference_mode():
            say("determinism floor")
            outcomes = [self.determinism()]
            self.limit = max(self.limit, _FLOOR_FACTOR * outcomes[0].largest_difference)
            for check in checks:
                say(check.__name__.replace("_", " "))
                outcomes.append(check())
        return outcomes

    # reading

    def _read(self, ids_BT: torch.Tensor, cache: Any = None, **extra: Any) -> tuple[torch.Tensor, Any]:
        """Log-probabilities [B, T, V] and the cache."""
        given = {} if cache is None else cache_argument(cache)
        outputs = self.model(ids_BT, use_cache=True, **given, **extra)
        return torch.log_softmax(outputs.logits.float(), dim=-1), cache_of(outputs)

    def _by_token(self, ids_1T: torch.Tensor, cache: Any) -> torch.Tensor:
        """Log-probabilities of tokens that are read one at a time, [1, T, V]."""
        parts = []
        for place in range(ids_1T.shape[1]):
            log_p, cache = self._read(ids_1T[:, place : place + 1], cache)
            parts.append(log_p)
        return torch.cat(parts, dim=1)

    def _judge(self, name: str, detail: str, cases: Iterator[Case]) -> InvariantOutcome:
        return judge(name, detail, cases, self.limit, _EXPLAINED[name])

    # checks

    def determinism(self) -> InvariantOutcome:
        """Equal inputs, equal logits."""

        def cases() -> Iterator[Case]:
            first, _ = self._read(self.a_1T)
            for n in range(3):
                yield Case(f"reading {n + 2} of the same prompt", lambda: _gap(first, self._read(self.a_1T)[0]))

        return self._judge("determinism floor", "the same prompt read four times", cases())

    def prefill_split(self) -> InvariantOutcome:
        """Two parts, cut at every residue, against one."""

        def cases() -> Iterator[Case]:
            whole, _ = self._read(self.a_1T)
            for cut in self._cuts():
                yield Case(f"parts of {cut} and {self.length - cut} tokens", partial(self._split, whole, cut))

        return self._judge("prefill split", f"two parts against one, cut at residues mod {self.stride}", cases())

    def _split(self, whole: torch.Tensor, cut: int) -> float:
        _, cache = self._read(self.a_1T[:, :cut])
        return _gap(whole[:, cut:], self._read(self.a_1T[:, cut:], cache)[0])

    def decode(self) -> InvariantOutcome:
        """Token by token from every residue against one prefill."""

        def cases() -> Iterator[Case]:
            whole, _ = self._read(self.a_1T)
            for cut in self._cuts(laps=1):
                yield Case(f"decoding from token {cut}", partial(self._decoded, whole, cut))

        return self._judge(
            "decode against prefill",
            f"token by token from every residue mod {self.stride} against one prefill",
            cases(),
        )

    def _decoded(self, whole: torch.Tensor, cut: int) -> float:
        _, cache = self._read(self.a_1T[:, :cut])
        end = min(cut + 2 * self.stride, self.length)
        return _gap(whole[:, cut:end], self._by_token(self.a_1T[:, cut:end], cache))

    def short_after_another(self) -> InvariantOutcome:
        """Prompts of 1..S tokens after one request and after another."""

        def cases() -> Iterator[Case]:
            for tokens in range(1, min(self.stride + 1, self.length) + 1):
                if self.stride <= 16 or tokens in {1, 2, self.stride - 1, self.stride, self.stride + 1}:
                    yield Case(f"a prompt of {tokens} tokens", partial(self._after, tokens))

        return self._judge("short prompt after another request", "after two different requests", cases())

    def _after(self, tokens: int) -> float:
        short = self.a_1T[:, :tokens]
        self._read(self.a_1T.flip(1))
        first, _ = self._read(short)
        self._read(self.b_1T)
        return _gap(first, self._read(short)[0])

    def warm_prefix(self) -> InvariantOutcome:
        """A kept prefix, continued twice, against whole prompts."""

        def cases() -> Iterator[Case]:
            whole, _ = self._read(self.a_1T)
            for cut in self._cuts():
                yield Case(f"a prefix of {cut} tokens", partial(self._warm, whole, cut))

        return self._judge("warm against cold prefix", "a prefix kept and continued twice", cases())

    def _warm(self, whole: torch.Tensor, cut: int) -> float:
        _, cache = self._read(self.a_1T[:, :cut])
        kept = copy.deepcopy(cache)
        other = torch.cat([self.a_1T[:, :cut], self.b_1T[:, cut:]], dim=1)
        first, _ = self._read(other[:, cut:], cache)
        second, _ = self._read(self.a_1T[:, cut:], kept)
        return max(_gap(self._read(other)[0][:, cut:], first), _gap(whole[:, cut:], second))

    def rollback(self) -> InvariantOutcome:
        """Cutting 1..S-1 tokens off and reading on."""

        def cases() -> Iterator[Case]:
            for tokens in residues_to_try(self.stride)[1:]:
                yield Case(f"cutting {tokens} tokens off", partial(self._cropped, tokens))

        return self._judge("rollback", "a cache cut back and continued against a fresh one", cases())

    def _cropped(self, tokens: int) -> float:
        start = self.length - self.stride
        _, cache = self._read(self.a_1T[:, : start - tokens])
        # Memories that drop what they have compressed keep what a crop needs only when they are told to.
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        self._read(self.a_1T[:, start - tokens : start], cache)
        if not getattr(cache, "is_croppable", True):
            raise NotTestableError("the cache says that it cannot be cut back, and assisted generation refuses it")
        try:
            cache.crop(-tokens)
        except (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError) as error:
            raise NotTestableError(
                f"the cache refuses to be cut back ({error}): nothing can go wrong unseen"
            ) from error
        whole, _ = self._read(self.a_1T)
        return _gap(whole[:, start - tokens :], self._read(self.a_1T[:, start - tokens :], cache)[0])

    def beam_reorder(self) -> InvariantOutcome:
        """Two rows that change places in the middle."""

        def cases() -> Iterator[Case]:
            for cut in self._cuts():
                yield Case(f"two rows swapped after {cut} tokens", partial(self._swapped, cut))

        return self._judge("beam reorder", "rows swapped in the cache against rows swapped in the prompt", cases())

    def _swapped(self, cut: int) -> float:
        rows = torch.cat([self.a_1T, self.b_1T])
        _, cache = self._read(rows[:, :cut])
        try:
            cache.reorder_cache(torch.tensor([1, 0], device=rows.device))
        except (NotImplementedError, AttributeError) as error:
            raise NotTestableError(f"the cache cannot be reordered ({error})") from error
        swapped = rows.flip(0)
        return _gap(self._read(swapped)[0][:, cut:], self._read(swapped[:, cut:], cache)[0])

    def batch_mates(self) -> InvariantOutcome:
        """A row alone, and with another before or behind it."""

        def cases() -> Iterator[Case]:
            alone, _ = self._read(self.a_1T)
            rows = torch.cat([self.a_1T, self.b_1T])
            yield Case("with a row behind it", lambda: _gap(alone, self._read(rows)[0][:1]))
            yield Case("with a row before it", lambda: _gap(alone, self._read(rows.flip(0))[0][1:]))

        return self._judge("batch-mates", "a row alone against the same row in a batch of two", cases())

    def right_padding(self) -> InvariantOutcome:
        """Pads behind a prompt."""
        return self._judge("right padding", "a prompt with pads behind it against the prompt", self._padded(False))

    def left_padding(self) -> InvariantOutcome:
        """Pads in front of a prompt."""
        return self._judge("left padding", "a prompt with pads before it against the prompt", self._padded(True))

    def _padded(self, left: bool) -> Iterator[Case]:
        alone, _ = self._read(self.a_1T)
        for pads in residues_to_try(self.stride)[1:]:
            yield Case(f"{pads} pad" + "s" * (pads > 1), partial(self._with_pads, alone, pads, left))

    def _with_pads(self, alone: torch.Tensor, pads: int, left: bool) -> float:
        token = getattr(self.model.config, "pad_token_id", None) or 0
        padding = torch.full((1, pads), token, device=self.a_1T.device)
        order = (padding, self.a_1T) if left else (self.a_1T, padding)
        mask = torch.cat([torch.full_like(part, int(part is self.a_1T)) for part in order], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        try:
            log_p, _ = self._read(torch.cat(order, dim=1), attention_mask=mask, position_ids=positions)
        except ValueError as error:
            raise NotTestableError(f"the model refuses padded batches ({error})") from error
        return _gap(alone, log_p[:, pads:] if left else log_p[:, : self.length])

    def visibility(self) -> InvariantOutcome:
        """What stands behind a query must not reach it, at every residue."""

        def cases() -> Iterator[Case]:
            whole, _ = self._read(self.a_1T)
            for residue in residues_to_try(self.stride):
                last = self.stride + residue
                yield Case(f"query at token {last} (residue {residue})", partial(self._seen, whole, last))

        return self._judge("visibility", "other tokens behind a query against its own logits", cases())

    def _seen(self, whole: torch.Tensor, last: int) -> float:
        other = torch.cat([self.a_1T[:, : last + 1], self.b_1T[:, last + 1 :]], dim=1)
        return _gap(whole[:, : last + 1], self._read(other)[0][:, : last + 1])

    def _cuts(self, laps: int = 2) -> list[int]:
        """Places to cut at: within the first stride, and at every residue of the next."""
        tried = [self.stride + residue for residue in residues_to_try(self.stride)]
        if laps > 1:
            tried += [residue for residue in residues_to_try(self.stride) if residue]
        return sorted(cut for cut in tried if 0 < cut < self.length)


def _gap(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference in log-probability over tokens that either side holds likely; inf where one is nan."""
    if bool(first.isnan().any()) or bool(second.isnan().any()):
        return float("inf")
    likely = torch.maximum(first, second) > _UNLIKELY
    return float((first - second).abs()[likely].max())
