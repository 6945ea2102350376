"""What every target that votes is: one prompt at several shifts, read once for each."""

from __future__ import annotations

from hashlib import sha256
from typing import Any


class Lanes:
    """Stands before the class of a target among the bases: what a vote adds to its facts and takes from its room.

    Attributes:
        shifts: neutral tokens behind start-of-text, one number for each lane.
        rule: how answers are combined; None: as it suits the target.
    """

    shifts: Any
    rule: Any

    @property
    def max_length_tokens(self) -> int | None:
        """Longest prompt that leaves room for the largest shift."""
        limit: int | None = super().max_length_tokens  # type: ignore[misc]
        return None if limit is None else limit - max(self.shifts)

    def fingerprint(self) -> str:
        """Digest of what is asked and the vote."""
        before: str = super().fingerprint()  # type: ignore[misc]
        return sha256(f"{before} {self.shifts} {self.rule}".encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest."""
        facts: dict[str, Any] = super().describe()  # type: ignore[misc]
        return {**facts, "vote_shifts": list(self.shifts), "vote_rule": self.rule_in_words()}

    def rule_in_words(self) -> str:
        """The rule that is used."""
        return str(self.rule)
