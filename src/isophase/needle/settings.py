"""What a needle run asks; everything that its prompts depend on."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field

from isophase.errors import IsophaseError

MOST_LENGTHS = 1000


class NeedleSettings(BaseModel):
    """Settings of a run; equal settings give equal prompts.

    Attributes:
        target: `hf:PATH_OR_ID`.
        fingerprint: of the model.
        caches: methods, as written.
        lengths: tokens of each prompt, in order.
        depths: places along the prompt.
        phases: neighbouring positions at each depth, one for each residue modulo this number.
        seed: decides codes, filler and the first residue.
        haystack: digest of the text that hides the needle.
        wording: of needle and question.
        gguf_file: GGUF file inside the folder.
        isophase: version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    fingerprint: str
    caches: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: int = Field(ge=1)
    phases: int = Field(ge=2)
    seed: int = Field(ge=0)
    haystack: str
    wording: str
    gguf_file: str | None = None
    isophase: str

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self.lengths) * self.depths * self.phases

    def place(self, row: int) -> tuple[int, int, int]:
        """Numbers of length, depth and column of a row; the column counts from the item's first position."""
        rest, column = divmod(row, self.phases)
        length, depth = divmod(rest, self.depths)
        return length, depth, column


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read `1000:4000:500` (both ends included), `1000,2000` or one number.

    Raises:
        IsophaseError: for anything else, or more than a thousand lengths.
    """
    problem = IsophaseError(f"--lengths is {text!r}.", "Give FIRST:LAST:STEP, numbers with commas, or one number.")
    if span := re.fullmatch(r"(\d+):(\d+):(\d+)", text):
        first, last, step = map(int, span.groups())
        if not 1 <= first <= last or step < 1 or (last - first) // step >= MOST_LENGTHS:
            raise problem
        return tuple(range(first, last + 1, step))
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise problem
    numbers = tuple(dict.fromkeys(int(n) for n in text.split(",")))
    if min(numbers) < 1 or len(numbers) > MOST_LENGTHS:
        raise problem
    return numbers
