"""Tokenizers that need no download: a closed vocabulary, and a small byte-level BPE of our own words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from isophase.probes.completion import TAIL
from isophase.probes.lexicon import FILLER, KEYS, PROSE, VALUES
from isophase.targets.planted import WordTokenizer


class Wrapped:
    """A `tokenizers.Tokenizer` seen through the probes' protocol."""

    def __init__(self, inner: tokenizers.Tokenizer, prefix_ids: tuple[int, ...] = ()) -> None:
        self.inner = inner
        self.prefix_ids = prefix_ids

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)


@pytest.fixture(scope="session")
def bpe() -> Wrapped:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " " + " ".join([*KEYS, *VALUES, *FILLER])
    inner.train_from_iterator([PROSE, words, words, TAIL], trainer)
    return Wrapped(inner, prefix_ids=(inner.token_to_id("<s>"),))


@pytest.fixture(scope="session")
def metaspace() -> Wrapped:
    """Like SentencePiece: a space goes in front of whatever is encoded."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<unk>", *byte_tokens], show_progress=False)
    words = " ".join([*KEYS, *VALUES, *FILLER])
    inner.train_from_iterator([*PROSE.split("\n"), words, words], trainer)
    return Wrapped(inner)


@pytest.fixture(scope="session")
def closed() -> WordTokenizer:
    return WordTokenizer()
