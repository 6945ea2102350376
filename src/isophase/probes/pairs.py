"""The closed vocabulary of the bundled models: one word, one token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isophase.probes.lexicon import FILLER, KEYS, VALUES

WORDS_PER_CLASS = 64
PAD_ID, END_ID, ASK_ID = 0, 1, 2

# The word of every id, in order. Checkpoints depend on it.
WORDS: tuple[str, ...] = (
    "<pad>",
    "<eos>",
    "?",
    *FILLER[:WORDS_PER_CLASS],
    *KEYS[:WORDS_PER_CLASS],
    *VALUES[:WORDS_PER_CLASS],
)


def _ids(block: int) -> npt.NDArray[np.int64]:
    first = 3 + block * WORDS_PER_CLASS
    return np.arange(first, first + WORDS_PER_CLASS)


FILLER_IDS, KEY_IDS, VALUE_IDS = _ids(0), _ids(1), _ids(2)
