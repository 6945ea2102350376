"""Gates: which slots of a window they weigh, and how many, on average and in each window.

Two effective numbers of slots tell a fixed habit from a choice. `static` is exp(H(E[a])), the spread of the
mean weights: 1 when always the same slot is read, W when all are read alike on average. `per_window` is
E[exp(H(a))]: how many slots one window reads. A gate that picks one slot by content has 1 per window and many
statically; a gate that is tied to its slot has few in both.

Legend: B prompts, E entries, W slots, K KV heads, C channels of a gate (1 for scalar gates), T tokens.

Source: Zhu et al., arXiv 2609.36322 (concentration of the gates).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from isophase.lab.explain.anatomy import GateBranch, gate_branches, hooked
from isophase.lab.explain.outcomes import Questions, read

WATCHED_PROMPTS = 256
"""Prompts that are read to average gates; each holds many windows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GateUse:
    """How one branch's gates of one KV head weigh the slots.

    Attributes:
        branch: which gates.
        kv_head: index of the KV head.
        profile: mean weight by slot, sum 1; mean over channels for vector gates.
        static_slots: exp(H(E[a])), 1..W; mean over channels.
        per_window_slots: E[exp(H(a))], 1..W; mean over channels.
    """

    branch: GateBranch
    kv_head: int
    profile: tuple[float, ...]
    static_slots: float
    per_window_slots: float


def effective_slots(weights: torch.Tensor, dim: int) -> torch.Tensor:
    """Effective number of slots, exp of the entropy along `dim`.

    Args:
        weights: at least 0, sum 1 along `dim`.
        dim: the axis of slots.

    Returns:
        1 for a single slot, W for equal weights.
    """
    slots: torch.Tensor = torch.special.entr(weights).sum(dim=dim).exp()
    return slots


class _Watch:
    """Sums over the windows that one branch reads. Windows that reach before token 0 are left out."""

    def __init__(self) -> None:
        self.weights_WKC: torch.Tensor | None = None
        self.slots_KC: torch.Tensor | None = None
        self.windows = 0

    def add(self, weights_BEWKC: torch.Tensor) -> None:
        if not weights_BEWKC.shape[1]:
            return
        weights = weights_BEWKC.double()
        mean, slots = weights.sum(dim=(0, 1)), effective_slots(weights, 2).sum(dim=(0, 1))
        self.weights_WKC = mean if self.weights_WKC is None else self.weights_WKC + mean
        self.slots_KC = slots if self.slots_KC is None else self.slots_KC + slots
        self.windows += weights.shape[0] * weights.shape[1]

    def own(self, branch: Any, inputs: tuple[torch.Tensor, torch.Tensor, slice]) -> None:
        """Pre-hook of a `WindowBranch` on a fixed grid, where all rows have the same windows."""
        windows_BEWD, filled_1EW, _ = inputs
        full_E = filled_1EW[0].all(dim=1)
        self.add(branch.weights(windows_BEWD[:, full_E], filled_1EW[:, full_E]))

    def deepseek(self, compressor: Any, _projection: Any, _inputs: Any, gates_BTC: torch.Tensor) -> None:
        """Hook of a `deepseek_v4` compressor's `gate_proj`, in a call without a cache."""
        self.add(deepseek_weights(compressor, gates_BTC)[:, :, :, None])


def deepseek_weights(compressor: Any, gates_BTC: torch.Tensor) -> torch.Tensor:
    """Gate weights of the full windows of a `deepseek_v4` compressor or indexer, float32 [B, E, W, C].

    With two series (CSA) a window's first half is the first series of the stride block before, its second
    half the second series of the block itself; the first block has no predecessor and is left out.
    """
    B, T, _ = gates_BTC.shape
    S, width = compressor.compress_rate, compressor.head_dim
    gates = gates_BTC[:, : T // S * S].reshape(B, T // S, S, -1) + compressor.position_bias
    if gates.shape[-1] > width:
        gates = torch.cat([gates[:, :-1, :, :width], gates[:, 1:, :, width:]], dim=2)
    return torch.softmax(gates.float(), dim=2)


def watch_gates(model: Any, questions: Questions, prompts: int = WATCHED_PROMPTS) -> list[GateUse]:
    """Average all gates of a model over the windows of some prompts.

    Args:
        model: a compressed model in evaluation mode.
        questions: prompts, read without a cache.
        prompts: about how many of them.

    Returns:
        One per branch and KV head; empty where the model has no gates, or prompts hold no full window.
    """
    branches = gate_branches(model)
    watches = [_Watch() for _ in branches]
    registrations = []
    for branch, watch in zip(branches, watches, strict=True):
        if branch.kind == "compressed_qwen3":
            registrations.append(partial(branch.module.register_forward_pre_hook, watch.own))
        else:
            projection = branch.module.gate_proj
            assert isinstance(projection, nn.Module)
            registrations.append(partial(projection.register_forward_hook, partial(watch.deepseek, branch.module)))
    with hooked(registrations):
        read(model, questions, prompts)
    uses = []
    for branch, watch in zip(branches, watches, strict=True):
        if watch.weights_WKC is None or watch.slots_KC is None:
            continue
        mean_WKC = watch.weights_WKC / watch.windows
        static_K = effective_slots(mean_WKC, 0).mean(dim=-1)
        per_window_K = watch.slots_KC.mean(dim=-1) / watch.windows
        profile_WK = mean_WKC.mean(dim=-1)
        uses += [
            GateUse(
                branch=branch,
                kv_head=k,
                profile=tuple(profile_WK[:, k].tolist()),
                static_slots=float(static_K[k]),
                per_window_slots=float(per_window_K[k]),
            )
            for k in range(len(static_K))
        ]
    return uses
