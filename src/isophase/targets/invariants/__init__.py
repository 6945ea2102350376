"""What must hold in any target before a phase is blamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.targets.invariants.local import LocalInvariants
    from isophase.targets.invariants.outcome import InvariantOutcome, InvariantStatus
    from isophase.targets.invariants.server import ServerInvariants
    from isophase.targets.invariants.shift import shift_by_stride

__all__ = ["InvariantOutcome", "InvariantStatus", "LocalInvariants", "ServerInvariants", "shift_by_stride"]

__getattr__, __dir__ = lazily(__name__, __file__)
