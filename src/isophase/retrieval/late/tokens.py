"""A text in the tokens of an encoder, with exact places, and the windows in which a long one is read.

Legend: T tokens of a text, special tokens not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isophase.errors import IsophaseError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """A text in tokens.

    Attributes:
        text: as given.
        ids_T: token ids.
        start_T: first character of each token, never falling; tokens of one character share it.
        end_T: one past the last character.
    """

    text: str
    ids_T: IntArray
    start_T: IntArray
    end_T: IntArray

    def __len__(self) -> int:
        return len(self.ids_T)


class ExactTokenizer:
    """Reads texts into tokens whose places come from the tokenizer itself.

    A text never turns into control tokens: a literal `[SEP]` is read as the characters that it is.

    Args:
        tokenizer: of transformers; must know offsets.
        prompt: text that the model expects before a document or a question; part of `head_ids`.

    Attributes:
        prompt: as given.
        head_ids: ids before the tokens of every window: special tokens, then the prompt.
        tail_ids: special ids after them.

    Raises:
        IsophaseError: for a tokenizer without an offset mapping.
    """

    def __init__(self, tokenizer: Any, prompt: str = "") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise IsophaseError(
                f"{type(tokenizer).__name__} has no offset mapping, so spans would be guesses.",
                "Give a model with a tokenizer.json (a fast tokenizer).",
            )
        self._tokenizer, self.prompt = tokenizer, prompt
        probe = tokenizer("a", return_special_tokens_mask=True)
        ids, special = probe["input_ids"], probe["special_tokens_mask"]
        own = [n for n, flag in enumerate(special) if not flag] or [0]
        before, after = ids[: own[0]], ids[own[-1] + 1 :]
        self.head_ids = np.array([*before, *(self.read(prompt).ids_T if prompt else ())], dtype=np.int64)
        self.tail_ids = np.array(after, dtype=np.int64)

    def read(self, text: str) -> Tokens:
        """Tokens of a text of any length.

        Raises:
            IsophaseError: if the tokenizer's places run backwards or leave the text.
        """
        found = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            split_special_tokens=True,
            verbose=False,
        )
        places = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        start, end = places[:, 0], places[:, 1]
        if len(start) and ((np.diff(start) < 0).any() or (end < start).any() or end.max() > len(text)):
            raise IsophaseError(
                f"the offset mapping of {type(self._tokenizer).__name__} runs backwards, so spans would be guesses.",
                "Give a model with another tokenizer.",
            )
        return Tokens(text=text, ids_T=np.array(found["input_ids"], dtype=np.int64), start_T=start, end_T=end)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens that are read at once.

    Attributes:
        start: first token.
        end: one past the last.
        keep_from: first token whose output counts; those before it were counted by the window before.
        first: the text begins here.
        last: the text ends here.
    """

    start: int
    end: int
    keep_from: int
    first: bool
    last: bool


def windows(tokens: int, capacity: int, overlap: int) -> Iterator[Window]:
    """Windows over a text; the kept parts cover every token once.

    Args:
        tokens: T.
        capacity: tokens of a window, more than `overlap`.
        overlap: tokens that a later window reads again and drops.

    Source: long late chunking (arXiv 2409.04701, algorithm 2). Every window here is a whole input of the model, with
        its special tokens; of those, only the outputs at the ends of the text count.
    """
    start = 0
    while True:
        end = min(start + capacity, tokens)
        keep_from = start + overlap if start else 0
        yield Window(start=start, end=end, keep_from=keep_from, first=start == 0, last=end == tokens)
        if end == tokens:
            return
        start = end - overlap
