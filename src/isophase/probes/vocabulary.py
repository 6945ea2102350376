"""Text pieces and words as token ids, for any tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from isophase.probes.lexicon import FILLER, KEYS, PROSE, VALUES
from isophase.probes.prompt import Tokenizer

Ids = npt.NDArray[np.int32]

_STRANGERS = ("gutters", "xqjvz")
"""A word of the prose and a non-word: no bundled vocabulary holds either."""


def piece_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text that will follow other text.

    SentencePiece tokenizers put a space before whatever they encode. Encoding the piece behind a letter
    and dropping the letter avoids that; where the two merge into one token, encode it plainly.

    Args:
        tokenizer: of the target.
        text: the piece, with its leading space if it starts with a word.

    Returns:
        Its ids, maybe none.
    """
    head = tokenizer.encode("a")
    whole = tokenizer.encode("a" + text)
    if whole[: len(head)] == head:
        return whole[len(head) :]
    return tokenizer.encode(text)


def single_token_words(tokenizer: Tokenizer, words: Iterable[str]) -> Ids:
    """Ids of those words that are, with a leading space, exactly one token.

    Args:
        tokenizer: of the target.
        words: candidates, in order.

    Returns:
        int32 [found], in the order of `words`. Words that decode to something else (unknown to the
        vocabulary) are left out.
    """
    found = []
    for word in words:
        ids = piece_ids(tokenizer, " " + word)
        if len(ids) == 1 and tokenizer.decode(ids).strip() == word:
            found.append(ids[0])
    return np.array(found, dtype=np.int32)


def prose_ids(tokenizer: Tokenizer) -> Ids:
    """Ids of the neutral prose as one line, int32 [tokens]."""
    return np.array(piece_ids(tokenizer, " " + " ".join(PROSE.split())), dtype=np.int32)


def has_closed_vocabulary(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer knows the bundled words and can spell nothing else.

    Subword tokenizers spell an unknown word in pieces that differ from word to word; a closed
    vocabulary maps all of them to the same unknown token, or to nothing.
    """
    strangers = [tokenizer.encode(word) for word in _STRANGERS]
    if strangers[0] != strangers[1] or len(strangers[0]) > 1:
        return False
    words = ("?", FILLER[0], KEYS[0], VALUES[0])
    known = [tokenizer.encode(word) for word in words]
    distinct = {tuple(ids) for ids in known}
    return all(len(ids) == 1 for ids in known) and len(distinct) == len(words) and strangers[0] not in known


def word_combinations(words: Ids, numbers: npt.NDArray[np.int64], tokens: int) -> Ids:
    """Write numbers as fixed-length sequences of words.

    Args:
        words: int32 [n], the digits.
        numbers: int64 [k], each in 0..n**tokens-1.
        tokens: length of each sequence.

    Returns:
        int32 [k, tokens], one distinct sequence per distinct number.
    """
    powers = len(words) ** np.arange(tokens, dtype=np.int64)
    digits = (numbers[:, None] // powers) % len(words)
    return np.take(words, digits)
