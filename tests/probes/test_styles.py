from __future__ import annotations

import numpy as np
import pytest

from isophase.errors import IsophaseError
from isophase.probes.lexicon import KEYS, VALUES
from isophase.probes.styles import STYLES, pick_style
from isophase.probes.vocabulary import has_closed_vocabulary, single_token_words, word_combinations


class Characters:
    """A tokenizer without words."""

    prefix_ids = ()

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Dropping(Characters):
    """A closed vocabulary that drops what it does not know."""

    words = ("?", "the", "cat", "red")

    def encode(self, text):
        return [self.words.index(word) for word in text.split() if word in self.words]

    def decode(self, ids):
        return " ".join(self.words[number] for number in ids)


def test_auto_tells_closed_vocabularies_from_subwords(closed, bpe, metaspace):
    assert pick_style("auto", closed).name == "pairs"
    assert pick_style("auto", bpe).name == "sentences"
    assert pick_style("auto", metaspace).name == "sentences"
    assert pick_style("auto", Characters()).name == "sentences"
    assert has_closed_vocabulary(Dropping())


def test_unknown_style_names_the_known_ones(closed):
    with pytest.raises(IsophaseError, match="auto, pairs, sentences, compact"):
        pick_style("prose", closed)


def test_sentences_read_as_text(bpe):
    style = STYLES["sentences"].resolve(bpe)
    keys, values = style.key_words[:1, None], style.value_words[:1, None]
    assert bpe.decode(style.record.fill(keys, values)[0]) == " The code for cat is red."
    question = bpe.decode(style.question.fill(keys, values)[0])
    assert question == " The code for cat is"
    assert bpe.decode(style.shot.fill(keys, values)[0]) == question + " red."
    assert style.prologue[0] == bpe.prefix_ids[0]


def test_sentencepiece_like_tokenizers_get_no_stray_spaces(metaspace):
    style = STYLES["sentences"].resolve(metaspace)
    assert len(style.key_words) > 300
    record = style.record.fill(style.key_words[:1, None], style.value_words[:1, None])[0]
    assert metaspace.decode(record) == "The code for cat is red."


def test_compact_is_four_tokens_at_two_per_key(bpe):
    style = STYLES["compact"].resolve(bpe, key_tokens=2)
    assert len(style.record.ids) == 4
    record = style.record.fill(style.key_words[None, :2], style.value_words[:1, None])[0]
    assert bpe.decode(record) == " cat dog red\n"


def test_words_are_single_tokens_that_round_trip(bpe, closed):
    for tokenizer in (bpe, closed):
        ids = single_token_words(tokenizer, [*KEYS, "pavementxq", *VALUES])
        assert len(set(ids.tolist())) == len(ids) > 600
        assert {tokenizer.decode([number]).strip() for number in ids} <= {*KEYS, *VALUES}


def test_word_combinations_are_distinct():
    words = np.array([7, 9, 4], dtype=np.int32)
    rows = word_combinations(words, np.arange(27), 3)
    assert rows.shape == (27, 3)
    assert len({tuple(row) for row in rows.tolist()}) == 27


def test_values_repeat_evenly_when_there_are_too_few(closed):
    style = STYLES["pairs"].resolve(closed, key_tokens=2)
    values = style.draw_numbers(np.random.default_rng(0), 3 * len(style.value_words))[1]
    assert set(np.bincount(values).tolist()) == {3}


def test_style_that_does_not_apply_is_an_error(closed):
    with pytest.raises(IsophaseError, match=r"'compact' does not apply.*cannot spell.*--style"):
        STYLES["compact"].resolve(closed)
    with pytest.raises(IsophaseError, match=r"single tokens, and this tokenizer has 0.*--style"):
        STYLES["sentences"].resolve(Characters())
