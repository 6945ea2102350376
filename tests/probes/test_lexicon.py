from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from isophase.probes.lexicon import FILLER, KEYS, PROSE, VALUES
from isophase.probes.pairs import FILLER_IDS, KEY_IDS, VALUE_IDS, WORDS


@pytest.mark.parametrize("words", [KEYS, VALUES, FILLER])
def test_words_are_unique_lower_case_ascii(words):
    assert len(set(words)) == len(words)
    assert all(re.fullmatch("[a-z]+", word) for word in words)


def test_sizes_and_disjointness():
    assert len(KEYS) >= 400
    assert len(VALUES) >= 400
    assert len(FILLER) == 64
    assert len({*KEYS, *VALUES, *FILLER}) == len(KEYS) + len(VALUES) + len(FILLER)


def test_prose_mentions_no_key_and_no_value():
    words = re.findall("[a-z]+", PROSE.lower())
    assert len(words) > 600
    assert not set(words) & {*KEYS, *VALUES}
    assert PROSE.isascii()
    assert not re.search(r"\d", PROSE)


def test_layout_of_the_bundled_vocabulary():
    """Trained weights depend on this order."""
    words = np.array(WORDS)
    assert len(words) == len(set(WORDS)) == 195
    assert words[:3].tolist() == ["<pad>", "<eos>", "?"]
    assert words[FILLER_IDS].tolist() == list(FILLER)
    assert words[KEY_IDS].tolist() == list(KEYS[:64])
    assert words[VALUE_IDS].tolist() == list(VALUES[:64])
    assert (FILLER_IDS[0], KEY_IDS[0], VALUE_IDS[0]) == (3, 67, 131)
    heads = " ".join([*FILLER[:64], *KEYS[:64], *VALUES[:64]])
    assert hashlib.sha256(heads.encode()).hexdigest()[:16] == "a594fad3a109a310"
