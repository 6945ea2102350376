"""One's own prompt, with neutral tokens inserted at a mark: everything behind it moves, nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from isophase.errors import IsophaseError
from isophase.probes.lexicon import FILLER
from isophase.probes.prompt import Prompt, Tokenizer
from isophase.probes.vocabulary import Ids, has_closed_vocabulary, piece_ids, prose_ids, single_token_words

LONGEST_ANSWER_TOKENS = 64


def read_prompt(path: Path) -> str:
    """Text of a prompt file, without the line end that editors put at its end.

    Raises:
        IsophaseError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise IsophaseError(
            f"{str(path)!r} is not UTF-8 (byte {error.start}).", "Convert it, for example with iconv -t UTF-8."
        ) from error
    except OSError as error:
        raise IsophaseError(f"cannot read {str(path)!r}: {error.strerror}.", "Check the path.") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise IsophaseError(f"{str(path)!r} is empty.", "Give a file that holds the prompt.")
    return text


@dataclass(frozen=True, kw_only=True)
class OwnPrompt:
    """A text and the place where neutral tokens go.

    Args:
        text: the prompt.
        tokenizer: of the target.
        mark: text before which tokens are inserted; empty: the start.

    Raises:
        IsophaseError: the mark is not there exactly once, or the tokenizer does not know the text.
    """

    text: str
    tokenizer: Tokenizer
    mark: str = ""

    def __post_init__(self) -> None:
        found = self.text.count(self.mark) if self.mark else 1
        if found != 1:
            how = "is not in the prompt" if not found else f"is in the prompt {found} times"
            raise IsophaseError(f"--at {self.mark!r} {how}.", "Give a text that is there exactly once.")
        if has_closed_vocabulary(self.tokenizer):
            known = self.tokenizer.decode(self.tokenizer.encode(self.text)).split()
            for word, spelled in zip(self.text.split(), known, strict=False):
                if word != spelled:
                    raise IsophaseError(
                        f"the target's tokenizer does not know the word {word!r}.",
                        "Models with a closed vocabulary, such as the bundled ones, read only its words.",
                    )

    @cached_property
    def ids(self) -> Ids:
        """Ids of the unchanged prompt, start-of-text included, int32 [T]."""
        return np.array([*self.tokenizer.prefix_ids, *self.tokenizer.encode(self.text)], dtype=np.int32)

    @cached_property
    def position_tokens(self) -> int:
        """Where tokens are inserted: the token boundary at the mark, or the last one before it."""
        prefix = len(self.tokenizer.prefix_ids)
        if not self.mark:
            return prefix
        before = self.tokenizer.encode(self.text[: self.text.index(self.mark)])
        whole = self.ids[prefix:].tolist()
        same = 0
        while same < min(len(before), len(whole)) and before[same] == whole[same]:
            same += 1
        return prefix + same

    @cached_property
    def _neutral(self) -> Ids:
        """Tokens to insert, in order; they repeat when they end."""
        if has_closed_vocabulary(self.tokenizer):
            return single_token_words(self.tokenizer, FILLER)
        return prose_ids(self.tokenizer)

    def shifted(self, tokens: int) -> Ids:
        """Ids with so many neutral tokens at the mark, int32 [T + tokens].

        Args:
            tokens: >= 0.
        """
        filler = np.resize(self._neutral, tokens) if tokens else self._neutral[:0]
        at = self.position_tokens
        return np.concatenate([self.ids[:at], filler, self.ids[at:]]).astype(np.int32)

    def prompt(self, tokens: int, answer_ids: Sequence[int]) -> Prompt:
        """The prompt with `tokens` neutral tokens, asking for `answer_ids`."""
        return Prompt(
            ids=self.shifted(tokens),
            answer_ids=tuple(map(int, answer_ids)),
            item=0,
            column=tokens,
            position_tokens=self.position_tokens + tokens,
            span_tokens=1,
        )

    def answers(self, expected: str) -> list[tuple[int, ...]]:
        """Ways to write an expected answer behind the prompt: with a space before it, and without.

        Args:
            expected: not empty.

        Raises:
            IsophaseError: it is empty or longer than `LONGEST_ANSWER_TOKENS`.
        """
        if not expected.strip():
            raise IsophaseError("--expect is empty.", "Give the answer, or --stable.")
        spaced = expected if expected[0].isspace() or self.text[-1].isspace() else " " + expected
        found = dict.fromkeys(tuple(piece_ids(self.tokenizer, text)) for text in (spaced, expected))
        longest = max(map(len, found))
        if longest > LONGEST_ANSWER_TOKENS:
            raise IsophaseError(
                f"--expect has {longest} tokens, and {LONGEST_ANSWER_TOKENS} are the most.", "Give its first words."
            )
        spelled = [ids for ids in found if ids and self.tokenizer.decode(ids).strip() == expected.strip()]
        if not spelled:
            raise IsophaseError(
                f"the target's tokenizer cannot spell --expect {expected!r}.", "Give an answer in its words."
            )
        return spelled
