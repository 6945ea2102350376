"""The reference: everything is kept."""

from __future__ import annotations

from dataclasses import dataclass

from isophase.cache.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """The uncompressed cache, with the interface of the others."""

    ratio: float | None = 1.0

    @property
    def compresses(self) -> bool:
        """Never."""
        return False
