"""The `completion` probe: finish a line of code whose right last token stands further up.

A source text quantises to FP8 and ends in a cast `.to(torch.float`, which only `8` completes rightly;
`32`, which the code uses for its arithmetic, is the tempting wrong answer. A decorative rule in the
docstring grows by one token per column, so everything behind it shifts by one position and nothing
else changes.

The rule is built from ids: one token repeated. A tokenizer would merge the same text into fewer tokens;
the ids, not the text, are the truth here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isophase.errors import IsophaseError
from isophase.probes.prompt import Prompt, Tokenizer
from isophase.probes.settings import ProbeSettings
from isophase.probes.vocabulary import Ids, piece_ids

FAMILIES = 4
SHORTEST_TOKENS = 24
LENGTHS = 16
CANDIDATES = ("=", "-", "#", "~", "*", "_", "+", ".", ":", "^", "|", "/", "%", "@")
"""Characters of the decorative rule, in order of preference."""

HEAD = '"""Eight-bit storage for weight matrices.\n\n'
TAIL = '''

Weights are kept in FP8 (one byte per element) and scaled row by row. The arithmetic before the final
cast runs in single precision.
"""

import torch

LARGEST_E4M3 = 448.0


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to FP8 (e4m3), with one scale per row.

    Args:
        weight: [rows, columns], any floating type.

    Returns:
        The quantised matrix (torch.float8_e4m3fn) and the scales [rows, 1] (torch.float32).
    """
    exact = weight.to(torch.float32)
    scale = exact.abs().amax(dim=1, keepdim=True) / LARGEST_E4M3
    scale = scale.clamp(min=1e-12).to(torch.float32)
    scaled = (exact / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    # One byte per element from here on: the cast to e4m3 rounds.
    quantised = scaled.to(torch.float'''


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    right: tuple[int, ...]
    tempting: tuple[int, ...]


class CompletionProbe:
    """Four families of filler by sixteen lengths of it.

    The probe brings its own items and columns; of `settings` it uses nothing. `position_tokens` is where
    the filler ends and the code's part begins; `span_tokens` is 1, since no record can be cut.

    Args:
        settings: kept for the record.
        tokenizer: of the target.

    Raises:
        IsophaseError: the tokenizer cannot spell the answers or the filler.
    """

    name = "completion"
    items = FAMILIES
    window_tokens = LENGTHS

    def __init__(self, settings: ProbeSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self._head = np.array([*tokenizer.prefix_ids, *tokenizer.encode(HEAD)], dtype=np.int32)
        self._tail = np.array(piece_ids(tokenizer, TAIL), dtype=np.int32)
        self._numbers = _number_ids(tokenizer)
        self.families, self._filler_ids = self._find_families(tokenizer)

    def __len__(self) -> int:
        """Number of prompts."""
        return self.items * self.window_tokens

    def __iter__(self) -> Iterator[Prompt]:
        """All prompts in row order."""
        return (self.prompt(row) for row in range(len(self)))

    def prompt(self, row: int) -> Prompt:
        """Build one prompt.

        Args:
            row: `family * 16 + (filler length - 24)`, 0..63.

        Returns:
            The prompt; `choices` holds the tempting wrong answer.

        Raises:
            IndexError: no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside 0..{len(self) - 1}")
        family, column = divmod(row, self.window_tokens)
        filler_tokens = SHORTEST_TOKENS + column
        return Prompt(
            ids=self._ids(self._filler_ids[family], filler_tokens),
            answer_ids=self._numbers.right,
            item=family,
            column=column,
            position_tokens=len(self._head) + filler_tokens,
            span_tokens=1,
            choices=(self._numbers.tempting,),
        )

    def _ids(self, filler_id: int, filler_tokens: int) -> Ids:
        filler = np.full(filler_tokens, filler_id, dtype=np.int32)
        return np.concatenate([self._head, filler, self._tail])

    def _find_families(self, tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Take the first characters whose repetition decodes to the text that is meant."""
        characters: list[str] = []
        filler_ids: list[int] = []
        for character in CANDIDATES:
            if len(characters) == FAMILIES:
                break
            ids = piece_ids(tokenizer, character)
            if len(ids) == 1 and ids[0] not in filler_ids and self._decodes(tokenizer, character, ids[0]):
                characters.append(character)
                filler_ids.append(ids[0])
        if len(characters) < FAMILIES:
            raise IsophaseError(
                f"The completion probe does not apply: it needs {FAMILIES} decorative characters that are "
                f"single tokens, and this tokenizer has {len(characters)} of {' '.join(CANDIDATES)}.",
                "Use --probe records.",
            )
        return tuple(characters), tuple(filler_ids)

    def _decodes(self, tokenizer: Tokenizer, character: str, filler_id: int) -> bool:
        """Whether every length of this filler reads as intended (start-of-text left aside)."""
        skip = len(tokenizer.prefix_ids)
        return all(
            tokenizer.decode(self._ids(filler_id, tokens)[skip:].tolist()).strip() == HEAD + character * tokens + TAIL
            for tokens in range(SHORTEST_TOKENS, SHORTEST_TOKENS + LENGTHS)
        )


def _number_ids(tokenizer: Tokenizer) -> _Numbers:
    """Ids of `8` and `32` as this tokenizer writes them behind `torch.float`."""
    stem = tokenizer.encode("torch.float")
    found = {}
    for number in ("8", "32"):
        whole = tokenizer.encode("torch.float" + number)
        ids = tuple(whole[len(stem) :])
        if whole[: len(stem)] != stem or not ids or tokenizer.decode(ids).strip() != number:
            raise IsophaseError(
                f"The completion probe does not apply: this tokenizer cannot spell {number!r} "
                "behind 'torch.float' as tokens of its own.",
                "Use --probe records.",
            )
        found[number] = ids
    if len(found["8"]) != 1 or found["32"][0] == found["8"][0]:
        raise IsophaseError(
            "The completion probe does not apply: in this tokenizer '8' is not a single token that "
            "differs from the start of '32'.",
            "Use --probe records.",
        )
    return _Numbers(right=found["8"], tempting=found["32"])
