"""Dense: everything is read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Read everything."""

    name: str = field(default="dense", init=False)
