"""Seeded data for the tests of `isophase.statistics`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from isophase.statistics import Observations

FloatArray = NDArray[np.float64]
Pattern = Callable[[NDArray[np.int64]], FloatArray]

# Uniform modulo every default period.
START_RANGE = 13_440


def flat(_positions: NDArray[np.int64]) -> FloatArray:
    return np.zeros(_positions.shape)


def sinusoid(period: int, amplitude: float, phase: float = 0.0) -> Pattern:
    return lambda x: amplitude * np.cos(2 * np.pi * x / period - phase)


def weak_residue(period: int, residue: int, depth: float) -> Pattern:
    return lambda x: np.where(x % period == residue, -depth, 0.0)


def draw(
    rng: np.random.Generator,
    items: int,
    window: int,
    pattern: Pattern = flat,
    *,
    accuracy: float = 0.8,
    spread: float = 0.0,
    trend: float = 0.0,
    wobble: float = 0.0,
    span: int = 2,
) -> Observations:
    """Items of differing difficulty, a depth trend, a smooth curve per item, and a pattern by position.

    `spread`, `trend` (from window start to end) and `wobble` act on the logit, `pattern` on the accuracy.
    """
    positions = rng.integers(0, START_RANGE, items)[:, None] + np.arange(window)
    depth = np.linspace(-0.5, 0.5, window)
    logit = np.log(accuracy / (1 - accuracy)) + spread * rng.normal(size=(items, 1)) + trend * depth
    for _ in range(3):
        cycles = rng.uniform(0.3, 2.5, (items, 1))
        phase = rng.uniform(0, 2 * np.pi, (items, 1))
        logit = logit + wobble * np.cos(2 * np.pi * cycles * depth + phase)
    chance = np.clip(1 / (1 + np.exp(-logit)) + pattern(positions), 0, 1)
    return Observations((rng.random((items, window)) < chance).astype(float), positions, span)


@pytest.fixture(scope="session")
def sim() -> SimpleNamespace:
    """The generators above; tests are imported without a package, so they cannot import this file."""
    return SimpleNamespace(draw=draw, flat=flat, sinusoid=sinusoid, weak_residue=weak_residue)
