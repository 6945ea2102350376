"""Repair a trained model: exchange, average or refit its gates, or change its chunks and fine-tune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.mitigate.repair.run import METHODS, RepairSettings, repair

__all__ = ["METHODS", "RepairSettings", "repair"]

__getattr__, __dir__ = lazily(__name__, __file__)
