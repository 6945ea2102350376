"""Remedies for models that are already deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.mitigate.specs import can_vote, open_target, vote_suffix, with_vote

__all__ = ["can_vote", "open_target", "vote_suffix", "with_vote"]

__getattr__, __dir__ = lazily(__name__, __file__)
