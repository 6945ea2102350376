"""A local model that answers by a phase vote, so that an audit measures the remedy.

Legend: S shifts, B prompts of one batch, T tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from isophase.mitigate.vote.generate import combine_logits, insert_neutral
from isophase.mitigate.vote.lanes import Lanes
from isophase.mitigate.vote.shifts import neutral_ids
from isophase.probes import Prompt
from isophase.targets import HuggingFaceTarget


class VotedTarget(Lanes, HuggingFaceTarget):
    """Reads every prompt at every shift and answers by the vote.

    Whether an answer is right is decided by teacher forcing at every shift: as far as an answer is right, that is what
    voting token by token comes to.

    Args:
        inner: the model without a vote; it is loaded once for both.
        name: spec of this target.
        shifts: neutral tokens that are inserted behind start-of-text, one number for each lane.
        rule: as in `isophase.mitigate.vote.generate.combine_logits`.
    """

    def __init__(self, inner: HuggingFaceTarget, *, name: str, shifts: tuple[int, ...], rule: str) -> None:
        self._inner, self.shifts, self.rule = inner, shifts, rule
        super().__init__(
            inner.path,
            name=name,
            gguf_file=inner.gguf_file,
            device=str(inner.device),
            dtype=inner.dtype,
            batch_tokens=inner.batch_tokens,
            defaults=inner.defaults,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model, shared with the target that does not vote."""
        return self._inner.model

    def _logits(self, group: list[Prompt], answers: list[tuple[int, ...]], *, share: bool) -> torch.Tensor:
        """Log-probabilities of the vote for each answer token, [B, A, V]."""
        at, neutral = len(self.tokenizer.prefix_ids), neutral_ids(self.tokenizer)
        ids_BT = torch.stack([torch.from_numpy(prompt.ids) for prompt in group])
        said = []
        for shift in self.shifts:
            moved = insert_neutral(ids_BT, shift, at, neutral).numpy()
            prompts = [replace(prompt, ids=ids) for prompt, ids in zip(group, moved, strict=True)]
            said.append(super()._logits(prompts, answers, share=share))
        said_SBAV = torch.stack(said)
        combined = combine_logits(said_SBAV.flatten(1, 2), self.rule)
        return combined.view(said_SBAV.shape[1:])
