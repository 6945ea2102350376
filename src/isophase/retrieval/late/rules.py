"""Rules that read the text between tokens: sentences and delimiters; and rules written as text.

A text rule turns a text into one number for each token, how much it wants to start a chunk, and leaves the decision to
a rule of `isophase.chunking`. Numbers look at a few neighbouring tokens, so starts move with the text.

Legend: T tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from isophase.chunking import ChunkRule, FixedStride, LocalMaximum, TokenHash
from isophase.errors import IsophaseError
from isophase.retrieval.late.tokens import IntArray, Tokens
from isophase.specs import read_call, refuse_strangers

_PARAGRAPH, _SENTENCE, _PAUSE = 3, 2, 1
# A full stop before a small letter ends an abbreviation rather than a sentence.
_PATTERNS = (
    (_PAUSE, re.compile(r"[,;:][\"'”’)\]]*\s+|[，；：、]|\n")),
    (_SENTENCE, re.compile(r"[.!?…][\"'”’)\]]*\s+(?![a-z])|[。！？][」』”’）]*\s*")),
    (_PARAGRAPH, re.compile(r"\n[^\S\n]*\n\s*")),
)
_HASHED_TOKENS = 4


@runtime_checkable
class TextRule(Protocol):
    """A chunk rule that needs the text."""

    @property
    def rule(self) -> ChunkRule:
        """Decides over the marks."""

    def marks(self, tokens: Tokens) -> IntArray:
        """What `rule` reads instead of token ids, [T]."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The score of a token is the number that stands in place of its id."""

    needs_hidden: bool = field(default=False, init=False)

    def __call__(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None = None, before_B1D: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As given, int64 [B, T]."""
        return ids_BT


@dataclass(frozen=True, kw_only=True)
class Delimiters:
    """Chunks that start behind the strongest delimiter around: a blank line, a sentence's end, a pause or line end.

    Attributes:
        max_tokens: longest chunk; where no delimiter comes, it is cut there.
        radius_tokens: chunks that delimiters end are longer than this, about twice as long on average; 0: a third of
            `max_tokens`.

    Raises:
        ValueError: for sizes out of range.
    """

    max_tokens: int = 128
    radius_tokens: int = 0
    weakest: int = field(default=_PAUSE, init=False)

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"longest chunk {self.max_tokens} must be at least 2 tokens")
        if self.radius_tokens < 0:
            raise ValueError(f"radius {self.radius_tokens} must not be negative")
        _ = self.rule

    @property
    def rule(self) -> ChunkRule:
        """Local maxima of the marks."""
        radius = self.radius_tokens or max(1, self.max_tokens // 3)
        return LocalMaximum(score=Given(), radius_tokens=radius, max_tokens=self.max_tokens)

    def marks(self, tokens: Tokens) -> IntArray:
        """Strength of the delimiter before each token; of equals, a hash of the tokens behind it decides."""
        strength_T = np.zeros(len(tokens), dtype=np.int64)
        for strength, pattern in _PATTERNS:
            if strength >= self.weakest:
                behind = np.array([match.end() for match in pattern.finditer(tokens.text)], dtype=np.int64)
                # The first token that reaches beyond the delimiter: some tokens begin with the space before a word.
                first = np.searchsorted(tokens.end_T, behind, side="right")
                strength_T[first[first < len(tokens)]] = strength
        hashed = np.zeros(len(tokens), dtype=np.int64)
        for n in range(_HASHED_TOKENS):
            behind_T = np.pad(tokens.ids_T[n:], (0, min(n, len(tokens))))
            hashed = (hashed * 0x01000193 + behind_T) & 0x7FFFFFFF
        ties = TokenHash()(torch.from_numpy(hashed)[None])[0].numpy()
        return np.where(strength_T > 0, (strength_T << 31) + ties, 0)


@dataclass(frozen=True, kw_only=True)
class Sentences(Delimiters):
    """Chunks of whole sentences and paragraphs.

    Attributes:
        max_tokens: longest chunk; a longer sentence is cut.
        radius_tokens: as in `Delimiters`.
    """

    max_tokens: int = 64
    weakest: int = field(default=_SENTENCE, init=False)


RULES = ("fixed", "sentences", "delimiters", "local-max")
_SETTINGS: dict[str, tuple[str, ...]] = {
    "fixed": ("stride_tokens", "shift_tokens"),
    "sentences": ("max_tokens", "radius_tokens"),
    "delimiters": ("max_tokens", "radius_tokens"),
    "local-max": ("radius_tokens", "max_tokens"),
}


def parse_rule(text: str) -> ChunkRule | TextRule:
    """Make a rule from text: `fixed(128)`, `sentences`, `delimiters(max_tokens=96)`, `local-max(32)`.

    Args:
        text: a name, or a call with whole numbers: `stride_tokens` and `shift_tokens` for `fixed`, `max_tokens` and
            `radius_tokens` for the others. The first may stand without its name.

    Raises:
        IsophaseError: for an unknown rule or setting, or a value out of range.
    """
    call = read_call(text, what="chunk rule", example="fixed(128), sentences or delimiters(max_tokens=96)")
    name = call.name.replace("_", "-")
    known = _SETTINGS.get(name)
    if known is None:
        raise IsophaseError(f"chunk rule {name!r} is unknown.", f"Give one of {', '.join(RULES)}.")
    refuse_strangers(name, call.settings, known)
    settings = dict(zip(known, call.values, strict=False)) | dict(call.settings)
    twice = len(settings) < len(call.values) + len(call.settings)
    if twice or any(type(value) is not int for value in settings.values()):
        raise IsophaseError(f"cannot read the chunk rule {text!r}.", f"{name} has {' and '.join(known)}.")
    try:
        if name == "fixed":
            return FixedStride(**({"stride_tokens": 128} | settings))
        if name == "local-max":
            radius = settings.get("radius_tokens", 32)
            return LocalMaximum(
                score=TokenHash(), radius_tokens=radius, max_tokens=settings.get("max_tokens", 4 * radius)
            )
        return Sentences(**settings) if name == "sentences" else Delimiters(**settings)
    except ValueError as error:
        raise IsophaseError(f"chunk rule {text!r}: {error}.", f"{name} has {' and '.join(known)}.") from error
