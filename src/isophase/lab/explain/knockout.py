"""Knockout: a head's output at the answering position is replaced by its mean over all prompts.

The mean carries what the head says whatever was asked; what is lost is what it says about this prompt.
Only the last A positions (those that predict the answer) are touched, so earlier layers and positions
are as before.

Legend: B prompts of a batch, T tokens, A answer tokens, C channels (query heads * head width), S phases.

Source: Zhu et al., arXiv 2609.36322, mean replacement at the final position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from isophase.lab.explain.anatomy import AttentionHeads, attention_heads, hooked
from isophase.lab.explain.curves import LEAST_ACCURACY
from isophase.lab.explain.outcomes import RESAMPLES, Questions, ask
from isophase.statistics import Observations

MOST_LOST, LEAST_LOST = 0.5, 0.1
"""A unit is selective when it costs more than the first share at some phases and less than the second at others."""

UnitKind = Literal["layer", "kv_head", "query_head"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """What one knockout takes out: a whole layer, the query heads of one KV head, or one query head."""

    kind: UnitKind
    heads: AttentionHeads
    index: int | None
    channels: slice

    @property
    def name(self) -> str:
        """Name for people."""
        words = {"layer": "", "kv_head": f", KV head {self.index}", "query_head": f", query head {self.index}"}
        return f"layer {self.heads.layer}{words[self.kind]}"


@dataclass(frozen=True, kw_only=True, eq=False)
class LostShares:
    """Share of the accuracy that a knockout costs, by phase; nan where there is none to lose.

    Attributes:
        share: [S], 1 minus after over before.
        low: [S], 95 % bound from a bootstrap over items, the same items before and after.
        high: [S], 95 % bound.
    """

    share: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def selective(self) -> bool:
        """Whether some phases lose more than half and others less than a tenth."""
        return bool(np.any(self.share > MOST_LOST) and np.any(self.share < LEAST_LOST))

    @property
    def surely_selective(self) -> bool:
        """The same by the bounds: at some phase the lower one, at another the upper one."""
        return bool(np.any(self.low > MOST_LOST) and np.any(self.high < LEAST_LOST))


def units_of(model: Any) -> list[Unit]:
    """What can be knocked out.

    Every layer; every KV head where a layer has several; where all query heads share one KV head, a KV head
    is the layer, and every query head is taken out by itself instead.
    """
    units = []
    for heads in attention_heads(model):
        group = heads.query_heads // heads.kv_heads
        units.append(Unit(kind="layer", heads=heads, index=None, channels=heads.channels(0, heads.query_heads)))
        if heads.kv_heads > 1:
            units += [
                Unit(kind="kv_head", heads=heads, index=k, channels=heads.channels(k * group, (k + 1) * group))
                for k in range(heads.kv_heads)
            ]
        elif heads.query_heads > 1:
            units += [
                Unit(kind="query_head", heads=heads, index=q, channels=heads.channels(q, q + 1))
                for q in range(heads.query_heads)
            ]
    return units


def mean_outputs(
    model: Any, questions: Questions, units: Sequence[Unit]
) -> tuple[dict[int, torch.Tensor], Observations]:
    """Mean output of all heads at the answering positions, over all prompts.

    Returns:
        By layer, [A, C]; and the outcomes of the unchanged model, which come with it.
    """
    keep = questions.answer_tokens
    sums: dict[int, torch.Tensor] = {}

    def add(layer: int, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        last_BAC = inputs[0].flatten(2)[:, -keep:].double()
        sums[layer] = sums.get(layer, torch.zeros_like(last_BAC[0])) + last_BAC.sum(dim=0)

    layers = {unit.heads.layer: unit.heads for unit in units}
    with hooked(partial(h.projection.register_forward_pre_hook, partial(add, n)) for n, h in layers.items()):
        outcomes = ask(model, questions)
    return {layer: total / len(questions.ids) for layer, total in sums.items()}, outcomes


@contextmanager
def replaced(unit: Unit, output_AC: torch.Tensor) -> Iterator[None]:
    """Replace a unit's output at the last A positions for the length of a `with` block.

    Args:
        unit: which channels.
        output_AC: what stands there instead, [A, C] or [B, A, C]; only the unit's channels are used.
    """
    keep = output_AC.shape[-2]

    def replace(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        changed = inputs[0].flatten(2).clone()
        changed[:, -keep:, unit.channels] = output_AC[..., unit.channels].to(changed.dtype)
        return (changed.reshape(inputs[0].shape), *inputs[1:])

    with hooked([partial(unit.heads.projection.register_forward_pre_hook, replace)]):
        yield


def knock_out(model: Any, questions: Questions, unit: Unit, means: dict[int, torch.Tensor]) -> Observations:
    """Outcomes with one unit replaced by its mean."""
    with replaced(unit, means[unit.heads.layer]):
        return ask(model, questions)


def lost_shares(
    before_IS: NDArray[np.float64], after_IS: NDArray[np.float64], *, resamples: int = RESAMPLES, seed: int = 0
) -> LostShares:
    """Share of the accuracy that is lost at each phase.

    Args:
        before_IS: accuracy by item and phase, model as it is.
        after_IS: the same items with the unit knocked out.
        resamples: of the bootstrap (exponential weights by item, Rubin 1981).
        seed: of the resamples.

    Returns:
        Shares and bounds; nan at phases where the accuracy before is below `LEAST_ACCURACY`.
    """
    weights = np.random.default_rng([seed, 4]).exponential(size=(resamples, len(before_IS)))
    weights = np.vstack([np.ones(len(before_IS)), weights])
    weights /= weights.sum(axis=1, keepdims=True)
    before, after = weights @ before_IS, weights @ after_IS
    counts = before[0] >= LEAST_ACCURACY
    shares = np.where(counts, 1 - after / np.maximum(before, 1e-9), np.nan)
    low, high = np.quantile(shares[1:], [0.025, 0.975], axis=0)
    return LostShares(share=shares[0], low=low, high=high)
