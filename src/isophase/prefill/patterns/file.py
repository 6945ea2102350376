"""Files of patterns: what `isophase prefill search` writes and `sparse_prefill` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from isophase.atomic import write_atomically
from isophase.errors import IsophaseError
from isophase.prefill.choose.policy import Table
from isophase.prefill.patterns import KINDS, Pattern
from isophase.prefill.patterns.spec import parse_pattern


class HeadPattern(BaseModel):
    """One head.

    Attributes:
        pattern: as text.
        recall: of attention, on the text that was searched, 0..1.
        density: keys read by keys that dense attention reads, 0..1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str
    recall: float
    density: float


class PatternFile(BaseModel):
    """Patterns of every layer and head of a model.

    Attributes:
        kind: what this file is.
        model: what was searched.
        text: digest of the text.
        tokens: length of the text.
        seed: of the sampled queries.
        budget: mean density that the search could spend, 0..1.
        layers: by layer and query head.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["isophase prefill patterns"] = "isophase prefill patterns"
    model: str
    text: str
    tokens: int
    seed: int
    budget: float
    layers: tuple[tuple[HeadPattern, ...], ...]

    def table(self) -> Table:
        """As a policy.

        Raises:
            IsophaseError: for a pattern that cannot be read.
        """
        return Table(layers=[[parse_pattern(head.pattern) for head in heads] for heads in self.layers])

    def recall(self) -> float:
        """Mean over heads."""
        heads = [head for layer in self.layers for head in layer]
        return sum(head.recall for head in heads) / len(heads)

    def density(self) -> float:
        """Mean over heads."""
        heads = [head for layer in self.layers for head in layer]
        return sum(head.density for head in heads) / len(heads)

    def save(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            OSError: as from the file system.
        """
        write_atomically(path, self.model_dump_json(indent=1) + "\n")


def read_patterns(path: Path) -> PatternFile:
    """Read a file of patterns.

    Raises:
        IsophaseError: if it is missing or not one.
    """
    try:
        return PatternFile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IsophaseError(
            f"cannot read the patterns {str(path)!r}: {error.strerror}.", "Make them with isophase prefill search."
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise IsophaseError(f"{str(path)!r} holds no patterns.", "Make them with isophase prefill search.") from error


def parse_patterns(text: str) -> Literal["auto"] | Pattern | PatternFile:
    """Patterns from an option: `auto`, a pattern for every head, or a file.

    Raises:
        IsophaseError: for anything else.
    """
    if text.strip() == "auto":
        return "auto"
    if text.strip().partition("(")[0] in KINDS:
        return parse_pattern(text)
    return read_patterns(Path(text).expanduser())
