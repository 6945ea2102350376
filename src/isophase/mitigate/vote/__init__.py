"""Votes over shifts: how answers are combined, which shifts are asked, and what answers by a vote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.mitigate.vote.generate import PhaseVote, combine_logits, insert_neutral
    from isophase.mitigate.vote.local import VotedTarget
    from isophase.mitigate.vote.rules import RULES, ShiftAnswer, combine
    from isophase.mitigate.vote.server import VotedServerTarget
    from isophase.mitigate.vote.shifts import DEFAULT_UNIT, choose_shifts, neutral_ids

__all__ = [
    "DEFAULT_UNIT",
    "RULES",
    "PhaseVote",
    "ShiftAnswer",
    "VotedServerTarget",
    "VotedTarget",
    "choose_shifts",
    "combine",
    "combine_logits",
    "insert_neutral",
    "neutral_ids",
]

__getattr__, __dir__ = lazily(__name__, __file__)
