"""How much each token said: its own loss under the model, known as soon as it is read.

Legend: B rows, T new tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Logits of so many positions at a time: those of a whole part would be larger than the model.
_POSITIONS = 256


def logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """From hidden states to logits as this model makes them, scale and soft limit included.

    Args:
        model: a causal language model of transformers.

    Returns:
        A function of states [N, D] that returns float32 [N, V].

    Raises:
        ValueError: if the model has no output embedding.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding, so what a token says is unknown; "
            "use worth='attention' or 'length'"
        )
    config = model.config.get_text_config(decoder=True)
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)

    def logits(states_ND: torch.Tensor) -> torch.Tensor:
        # By its weights rather than by calling it: hooks on the module are for the model's own calls.
        found = torch.nn.functional.linear(states_ND, head.weight, getattr(head, "bias", None)).float() * scale
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    return logits


class Surprise:
    """Takes down what each token says while a model reads; one for each cache.

    Attributes:
        last_BD: state behind each row's newest token, from which the next one is predicted.
    """

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits
        self.last_BD: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget everything read."""
        self.last_BD = None

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of rows."""
        self.last_BD = None if self.last_BD is None else choose(self.last_BD)

    def read(self, hidden_BTD: torch.Tensor, ids_BT: torch.Tensor, real_BT: torch.Tensor | None) -> torch.Tensor:
        """Nats of new tokens.

        Args:
            hidden_BTD: last states of the new tokens.
            ids_BT: their ids.
            real_BT: which are no padding; None: all.

        Returns:
            float32 [B, T]; 0 for pads, and for the first token of a text, which nothing predicts.
        """
        rows, new, width = hidden_BTD.shape
        last_BD = self.last_BD if self.last_BD is not None else hidden_BTD.new_zeros(rows, width)
        if real_BT is None:
            before_BTD = torch.cat([last_BD[:, None], hidden_BTD[:, :-1]], dim=1)
            self.last_BD = hidden_BTD[:, -1].clone()
        else:
            # The newest token before each: of this call, or the one behind which the last call ended.
            place = torch.arange(1, new + 1, device=hidden_BTD.device) * real_BT
            newest = place.cummax(dim=1).values
            at = torch.nn.functional.pad(newest, (1, 0))[:, :-1]
            wide = torch.cat([last_BD[:, None], hidden_BTD], dim=1)
            before_BTD = wide.gather(1, at[..., None].expand(-1, -1, width))
            self.last_BD = wide.gather(1, newest[:, -1:, None].expand(-1, -1, width))[:, 0].clone()
        states, ids = before_BTD.flatten(0, 1), ids_BT.flatten().long()
        parts = []
        for first in range(0, len(states), _POSITIONS):
            some = slice(first, first + _POSITIONS)
            logits = self._logits(states[some])
            parts.append(logits.logsumexp(-1) - logits.gather(1, ids[some, None])[:, 0])
        said = torch.cat(parts).view(rows, new).clamp(min=0)
        nothing = (before_BTD == 0).all(-1)
        said = said.masked_fill(nothing, 0.0)
        return said if real_BT is None else said * real_BT
