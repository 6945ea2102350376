"""The data every test reads: items by consecutive positions.

Shapes: N items, P window columns (consecutive token positions), m period in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Observations:
    """Outcomes of N items at P consecutive positions each.

    Attributes:
        outcomes: [N, P], 0 or 1, or any real score such as a log-probability; NaN where there is no answer.
        positions: [N, P], token position of the queried record; each row counts up by one.
        span_tokens: length of the record in tokens, at least 1.
        dropped_items: items that `complete` has left out so far.
    """

    outcomes: FloatArray
    positions: IntArray
    span_tokens: int
    dropped_items: int = 0

    def __post_init__(self) -> None:
        outcomes = np.asarray(self.outcomes, dtype=np.float64)
        positions = np.asarray(self.positions)
        if outcomes.ndim != 2 or outcomes.shape[1] < 1:
            raise ValueError(f"outcomes must be [items, positions], got shape {outcomes.shape}")
        if positions.shape != outcomes.shape:
            raise ValueError(f"positions have shape {positions.shape}, outcomes {outcomes.shape}")
        if not np.issubdtype(positions.dtype, np.integer):
            raise ValueError(f"positions must be whole numbers, got {positions.dtype}")
        if np.any(np.diff(positions, axis=1) != 1):
            raise ValueError("positions of an item must be consecutive: start, start + 1, ...")
        if np.isinf(outcomes).any():
            raise ValueError("outcomes must be finite, or NaN where there is no answer")
        if self.span_tokens < 1:
            raise ValueError(f"span_tokens is {self.span_tokens}, it must be at least 1")
        object.__setattr__(self, "outcomes", outcomes)
        object.__setattr__(self, "positions", positions.astype(np.int64))

    @property
    def items(self) -> int:
        """Number of items, N."""
        return int(self.outcomes.shape[0])

    @property
    def window_tokens(self) -> int:
        """Number of consecutive positions per item, P."""
        return int(self.outcomes.shape[1])

    @property
    def prompts(self) -> int:
        """Number of outcomes that are present."""
        return int(np.isfinite(self.outcomes).sum())

    @property
    def binary(self) -> bool:
        """Whether every outcome present is 0 or 1."""
        present = self.outcomes[np.isfinite(self.outcomes)]
        return bool(np.isin(present, (0.0, 1.0)).all())

    def complete(self) -> Observations:
        """Keep only items with an answer at every position.

        Pairing needs the whole window: an item with a hole would leak its difficulty into the residues that
        it has.

        Returns:
            Observations of the complete items; `dropped_items` counts the others.
        """
        whole = np.isfinite(self.outcomes).all(axis=1)
        return replace(
            self,
            outcomes=self.outcomes[whole],
            positions=self.positions[whole],
            dropped_items=self.dropped_items + int((~whole).sum()),
        )

    def window_for(self, period_tokens: int) -> Observations:
        """Keep the first floor(P / m) * m columns, so that each item meets each residue equally often.

        Args:
            period_tokens: m, at least 2.

        Returns:
            Observations whose window is a whole number of laps of m.

        Raises:
            ValueError: m is below 2 or longer than the window.
        """
        if period_tokens < 2:
            raise ValueError(f"period {period_tokens} is not testable, the shortest is 2 tokens")
        if period_tokens > self.window_tokens:
            raise ValueError(f"period {period_tokens} is not testable: the window has {self.window_tokens} positions")
        columns = self.window_tokens // period_tokens * period_tokens
        if columns == self.window_tokens:
            return self
        return replace(self, outcomes=self.outcomes[:, :columns], positions=self.positions[:, :columns])

    def laps_for(self, period_tokens: int) -> int:
        """Whole laps of m in the window, c = floor(P / m)."""
        return self.window_tokens // period_tokens

    def lap_means(self, period_tokens: int) -> FloatArray:
        """Mean outcome of each item at each residue, over the laps of the window.

        Args:
            period_tokens: m, 2 to P.

        Returns:
            [N, m]; column r belongs to positions with x mod m = r.
        """
        window = self.window_for(period_tokens)
        laps = window.laps_for(period_tokens)
        by_column = window.outcomes.reshape(window.items, laps, period_tokens).mean(axis=1)
        by_residue = np.empty(by_column.shape)
        np.put_along_axis(by_residue, window.positions[:, :period_tokens] % period_tokens, by_column, axis=1)
        return by_residue


def as_float_array(values: ArrayLike) -> FloatArray:
    """Convert to a float64 array."""
    return np.asarray(values, dtype=np.float64)
