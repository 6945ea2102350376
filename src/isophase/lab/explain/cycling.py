"""Gate cycling: the parameters of every offset move to the offset `delta` further, cyclically.

If a phase is weak because of the parameters at its offset (cause *slot*), the weak phase moves along, and
accuracy by phase is the original one, rolled by `delta`. What stays has another cause: a record that
straddles a chunk edge does so whatever the parameters.

All S rolls together are a balanced design, so the part that moves and the part that stays separate as the
two margins of one table.

Legend: D rolls, I items, S phases.

Source: Zhu et al., arXiv 2609.36322, gate cycling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isophase.lab.explain.anatomy import GateBranch, changed, roll
from isophase.lab.explain.outcomes import RESAMPLES, Questions, ask

Array = NDArray[np.float64]
SHOWN_SHIFTS = (-3, -2, -1, 1, 2, 3)
MOST_ROLLS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Rolls:
    """Accuracy under every roll.

    Attributes:
        shifts: rolls in tokens, 0 among them; all of 0..S-1, or evenly spaced ones where there are too many.
        accuracy: [D, I, S], by roll, item and phase.
    """

    shifts: tuple[int, ...]
    accuracy: Array

    @property
    def complete(self) -> bool:
        """Whether all S rolls took part, so that both parts separate exactly."""
        return len(self.shifts) == int(self.accuracy.shape[2])

    def staying(self) -> Array:
        """Accuracy by phase, averaged over the rolls: what does not move with the parameters."""
        return np.asarray(self.accuracy.mean(axis=0))

    def moving(self) -> Array:
        """Accuracy by the offset that the parameters came from, averaged over phases: what moves with them."""
        back = [np.roll(table, -shift, axis=1) for shift, table in zip(self.shifts, self.accuracy, strict=True)]
        return np.asarray(np.mean(back, axis=0))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well the rolled pattern predicts the observed one.

    Attributes:
        r_squared: 1 - residual over total sum of squares, no parameter fitted; negative where the mean would
            predict better. None where nothing varies or fewer than two points are left.
        correlation_squared: squared correlation, which forgives a wrong level and scale.
    """

    r_squared: float | None
    correlation_squared: float | None


def roll_all(
    model: Any, questions: Questions, branches: Sequence[GateBranch], stride_tokens: int, *, payloads: bool
) -> Rolls:
    """Measure accuracy by phase under every roll of the parameters by offset.

    Args:
        model: changed for the length of each measurement, and restored.
        questions: all prompts.
        branches: whose parameters are rolled.
        stride_tokens: S.
        payloads: roll the payloads' matrices together with the gates.
    """
    parameters = slot_parameters(branches, payloads=payloads)
    return measure_rolls(
        lambda delta: _ask_rolled(model, questions, parameters, stride_tokens, delta), rolls_of(stride_tokens)
    )


def slot_parameters(branches: Iterable[GateBranch], *, payloads: bool) -> list[Any]:
    """Parameters by offset of some branches: gates, and payloads if asked for."""
    return [p for branch in branches for p in (*branch.gates, *(branch.payloads if payloads else ()))]


def rolls_of(stride_tokens: int) -> tuple[int, ...]:
    """All rolls 0..S-1; where there are too many, evenly spaced ones and those that are shown."""
    if stride_tokens <= MOST_ROLLS:
        return tuple(range(stride_tokens))
    spaced = {n * stride_tokens // MOST_ROLLS for n in range(MOST_ROLLS)}
    return tuple(sorted(spaced | {shift % stride_tokens for shift in SHOWN_SHIFTS}))


def measure_rolls(accuracy_of: Callable[[int], Array], shifts: tuple[int, ...]) -> Rolls:
    """Collect [I, S] tables over rolls."""
    return Rolls(shifts=shifts, accuracy=np.stack([accuracy_of(delta) for delta in shifts]))


def _ask_rolled(model: Any, questions: Questions, parameters: list[Any], stride_tokens: int, delta: int) -> Array:
    with changed(parameters, roll(delta, stride_tokens)):
        return ask(model, questions).lap_means(stride_tokens)


def shown_shifts(stride_tokens: int) -> list[int]:
    """Rolls by -3..3 tokens that differ from each other and from none, each by its shortest way."""
    by_residue: dict[int, int] = {}
    for shift in sorted(SHOWN_SHIFTS, key=lambda s: (abs(s), -s)):
        if shift % stride_tokens:
            by_residue.setdefault(shift % stride_tokens, shift)
    return sorted(by_residue.values())


def predict(original_S: Array, delta: int) -> Array:
    """Accuracy by phase if everything moved with the parameters."""
    return np.roll(original_S, delta)


def kept_phases(boundary: Sequence[int], delta: int, stride_tokens: int, *, image: bool) -> list[int]:
    """Phases that are no boundary phase.

    Args:
        boundary: phases at which the record straddles a chunk edge.
        delta: the roll.
        stride_tokens: S.
        image: leave out as well the phases that the boundary phases are predicted to move to.
    """
    kept = [phase for phase in range(stride_tokens) if phase not in boundary]
    return [phase for phase in kept if not (image and (phase - delta) % stride_tokens in boundary)]


def fit(predicted: Array, observed: Array) -> Fit:
    """Compare predicted with observed accuracies, any number of points."""
    spread = float(((observed - observed.mean()) ** 2).sum()) if len(observed) > 1 else 0.0
    if spread < 1e-12:
        return Fit(r_squared=None, correlation_squared=None)
    residual = float(((observed - predicted) ** 2).sum())
    varies = float(np.ptp(predicted)) > 1e-9
    correlation = float(np.corrcoef(predicted, observed)[0, 1]) if varies else None
    return Fit(
        r_squared=1 - residual / spread, correlation_squared=None if correlation is None else min(correlation**2, 1.0)
    )


def pooled(
    original_IS: Array,
    observed_DIS: Array,
    shifts: Sequence[int],
    boundary: Sequence[int] = (),
    *,
    image: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Fit, tuple[float, float] | None]:
    """Fit over all shifts together, with a 95 % interval of R^2 from a bootstrap over items.

    Args:
        original_IS: accuracy of the unchanged model by item and phase.
        observed_DIS: under each shift.
        shifts: [D].
        boundary: phases to leave out, as `kept_phases` does.
        image: leave out their images as well.
        resamples: of the bootstrap (exponential weights by item, Rubin 1981).
        seed: of the resamples.

    Returns:
        The fit, and the interval; None where there is no R^2.
    """
    stride, items = original_IS.shape[1], len(original_IS)
    kept = [kept_phases(boundary, delta, stride, image=image) for delta in shifts]
    weights = np.random.default_rng([seed, 5]).exponential(size=(resamples, items))
    weights = np.vstack([np.ones(items), weights])
    weights /= weights.sum(axis=1, keepdims=True)
    original = weights @ original_IS
    rolled = [np.roll(original, delta, axis=1)[:, rows] for delta, rows in zip(shifts, kept, strict=True)]
    seen = [(weights @ table)[:, rows] for table, rows in zip(observed_DIS, kept, strict=True)]
    predicted, observed = np.concatenate(rolled, axis=1), np.concatenate(seen, axis=1)
    whole = fit(predicted[0], observed[0])
    if whole.r_squared is None:
        return whole, None
    spread = ((observed - observed.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    residual = ((observed - predicted) ** 2).sum(axis=1)
    draws = 1 - residual[1:] / np.maximum(spread[1:], 1e-12)
    low, high = np.quantile(draws, [0.025, 0.975])
    return whole, (float(low), float(high))
