"""Right answers by phase, with a model left as it is or changed by an intervention.

Legend: I items, P positions of the window, N = I * P prompts, T tokens, A answer tokens, S phases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isophase.errors import IsophaseError
from isophase.probes import Probe
from isophase.statistics import Observations

BATCH_TOKENS = 16_384
RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """All prompts of a probe, all of one length, as tensors.

    Attributes:
        ids: long [N, T], prompt and all answer tokens but the last: the last A positions predict the answer.
        answers: long [N, A], the right answers.
        positions: [I, P], position of the queried key in every prompt.
        span_tokens: length of the queried record from first key to last value token.
    """

    ids: torch.Tensor
    answers: torch.Tensor
    positions: NDArray[np.int64]
    span_tokens: int

    @property
    def answer_tokens(self) -> int:
        """A, tokens of an answer."""
        return int(self.answers.shape[1])

    def with_tokens(self, place: int, ids_IK: NDArray[np.int64]) -> Questions:
        """Insert tokens at one place of every prompt, the same for all prompts of an item.

        Args:
            place: index before which they are inserted; it must lie behind the queried record, whose phase
                thereby stays as it is.
            ids_IK: tokens for every item.

        Returns:
            The longer prompts.
        """
        assert place > int(self.positions.max()) + self.span_tokens - 1
        columns = self.positions.shape[1]
        inserted = torch.from_numpy(np.repeat(ids_IK, columns, axis=0))
        ids = torch.cat([self.ids[:, :place], inserted, self.ids[:, place:]], dim=1)
        return replace(self, ids=ids)


def questions_of(probe: Probe) -> Questions:
    """Build all prompts of a probe.

    Raises:
        IsophaseError: prompts or answers differ in length, as those of the completion probe do.
    """
    prompts = list(probe)
    if len({(len(p.ids), len(p.answer_ids), p.span_tokens) for p in prompts}) > 1:
        raise IsophaseError(
            f"the prompts of the {probe.name} probe differ in length.", "Use --probe records, prefix or in-sequence."
        )
    answers = np.array([p.answer_ids for p in prompts], dtype=np.int64)
    ids = np.concatenate([np.stack([p.ids for p in prompts]).astype(np.int64), answers[:, :-1]], axis=1)
    return Questions(
        ids=torch.from_numpy(ids),
        answers=torch.from_numpy(answers),
        positions=np.array([p.position_tokens for p in prompts]).reshape(probe.items, probe.window_tokens),
        span_tokens=prompts[0].span_tokens,
    )


@torch.inference_mode()
def ask(
    model: Any,
    questions: Questions,
    batch_tokens: int = BATCH_TOKENS,
    before_batch: Callable[[slice], object] | None = None,
) -> Observations:
    """Ask all questions; an answer is right when every one of its tokens is the most likely one.

    Args:
        model: a causal language model in evaluation mode; hooks and changed parameters take effect.
        questions: prompts of equal length, so no padding is needed.
        batch_tokens: most tokens of one forward pass.
        before_batch: told which prompts come next, for interventions that differ between prompts.

    Returns:
        Outcomes 0 and 1, [I, P].
    """
    length, keep = questions.ids.shape[1], questions.answer_tokens
    rows = max(1, batch_tokens // length)
    right = []
    for first in range(0, len(questions.ids), rows):
        batch = slice(first, first + rows)
        if before_batch is not None:
            before_batch(batch)
        logits = model(questions.ids[batch].to(model.device), use_cache=False, logits_to_keep=keep).logits
        picked = logits.argmax(dim=-1).cpu()
        right.append((picked == questions.answers[batch]).all(dim=1))
    outcomes = torch.cat(right).double().numpy().reshape(questions.positions.shape)
    return Observations(outcomes=outcomes, positions=questions.positions, span_tokens=questions.span_tokens)


@torch.inference_mode()
def read(model: Any, questions: Questions, most_prompts: int, batch_tokens: int = BATCH_TOKENS) -> None:
    """Let the model read some of the prompts, spread evenly, for the sake of hooks that watch it."""
    step = max(1, len(questions.ids) // most_prompts)
    ids_NT = questions.ids[::step]
    rows = max(1, batch_tokens // ids_NT.shape[1])
    for first in range(0, len(ids_NT), rows):
        model(ids_NT[first : first + rows].to(model.device), use_cache=False, logits_to_keep=1)
