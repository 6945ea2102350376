"""Whether looking pays on the prompt at hand: one on which it does not is given up before it has cost much."""

from __future__ import annotations

# Looking may cost this share of all layers' dense attention before it has saved as much.
_DEBT_SHARE = 0.02


class Ledger:
    """What looking has saved so far, layer by layer, in times of one layer's dense attention.

    Savings are those that a machine's costs predict, not measured ones: the same prompt is read in the same way again.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self._debt = -_DEBT_SHARE * layers
        self._at: tuple[int, tuple[int, ...]] = (-1, ())
        self._saved = 0.0

    def is_open(self, layer: int, shape: tuple[int, ...]) -> bool:
        """Whether to look at this call.

        Args:
            layer: its number. One that does not follow the last one begins another prompt.
            shape: of queries and keys. Another one begins another prompt, too.
        """
        if layer <= self._at[0] or shape != self._at[1]:
            self._saved = 0.0
        self._at = layer, shape
        return self._saved >= self._debt

    def book(self, saved: float) -> None:
        """Enter a layer's saving, less than 0 where looking cost more."""
        self._saved += saved
