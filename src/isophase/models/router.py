"""A learned chunk rule: where neighbouring tokens differ, as training finds useful.

Legend: B rows, T tokens, D model width, G groups of KV heads, E entries.

Source: Hwang, Wang and Gu, H-Net (arXiv 2507.07955): routing module and ratio loss. Different here: the router
reads embeddings, so a start depends on two tokens and nothing else, and moves with the text exactly; the
confidence scales entries, because there is no decoder that spreads chunks over tokens again; hence no
smoothing either.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["BoundaryRouter", "RouterScore", "confidence", "ratio_loss"]


class BoundaryRouter(nn.Module):
    """Probability that a chunk starts at a token: `(1 - cos(W_q h_t, W_k h_{t-1})) / 2`.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, hidden_BTD: torch.Tensor, before_B1D: torch.Tensor | None = None) -> torch.Tensor:
        """Probabilities, float32 [B, T].

        Args:
            hidden_BTD: embeddings.
            before_B1D: of the token before the first; None at the start of a text, whose first token has 1.
        """
        query = self.query(hidden_BTD).float()
        key = self.key(hidden_BTD).float()
        first = -query[:, :1] if before_B1D is None else self.key(before_B1D.to(hidden_BTD.dtype)).float()
        cosine = functional.cosine_similarity(query, torch.cat([first, key[:, :-1]], dim=1), dim=-1)
        return (1 - cosine) / 2


class RouterScore:
    """A router as the score of a chunk rule.

    Args:
        router: shared with the model, so the rule follows its training.
    """

    needs_hidden = True

    def __init__(self, router: BoundaryRouter) -> None:
        self._router = router

    @torch.no_grad()
    def __call__(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None, before_B1D: torch.Tensor | None
    ) -> torch.Tensor:
        """Probabilities, float32 [B, T]."""
        if hidden_BTD is None:
            raise ValueError("a router needs hidden states")
        probability: torch.Tensor = self._router(hidden_BTD, before_B1D)
        return probability


def confidence(probability_BT: torch.Tensor, start_BE: torch.Tensor, threshold: float) -> torch.Tensor:
    """1 in the forward pass; in the backward pass the probability that the chunk starts where it does.

    Args:
        probability_BT: of a router.
        start_BE: starts of chunks, long. Where a start is a cut at the greatest length, nothing is learned.
        threshold: above which a token starts a chunk.

    Returns:
        [B, E].
    """
    own_BE = probability_BT.gather(1, start_BE)
    own_BE = torch.where(own_BE > threshold, own_BE, own_BE.detach())
    return own_BE + (1 - own_BE).detach()


def ratio_loss(probability_BT: torch.Tensor, threshold: float, target_tokens: float) -> torch.Tensor:
    """1 where chunks have the wanted mean length, more elsewhere; gradients pass through the probabilities.

    Args:
        probability_BT: of a router.
        threshold: above which a token starts a chunk.
        target_tokens: N, wanted mean length, above 1.
    """
    wanted = target_tokens
    started = (probability_BT > threshold).float().mean()
    mean = probability_BT.mean()
    return wanted / (wanted - 1) * ((wanted - 1) * started * mean + (1 - started) * (1 - mean))
