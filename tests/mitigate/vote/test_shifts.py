"""Shifts meet the phases of every stride; neutral text makes exactly the tokens that it should."""

from __future__ import annotations

import pytest
from fake_server import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from isophase.errors import IsophaseError
from isophase.mitigate.vote.shifts import NeutralTexts, choose_shifts


class Bpe:
    """A byte-level BPE in which white space merges, as in most vocabularies."""

    def __init__(self) -> None:
        self.inner = Tokenizer(models.BPE())
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        text = ["The code is 42 .", " " * 16, "\n" * 8, "    a\n\n        b . . .", " .", " . . The"] * 40
        self.inner.train_from_iterator(text, trainer)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids


BPE = Bpe()
NEUTRAL = NeutralTexts(BPE)


def test_two_strides_at_once():
    shifts = choose_shifts((128, 4), 8)
    assert sorted(shift % 4 for shift in shifts) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(abs(shift - 16 * number) <= 2 for number, shift in enumerate(shifts))
    assert choose_shifts((8,), 8) == tuple(range(8))
    assert choose_shifts((8,), 4) == (0, 2, 4, 6)
    assert choose_shifts((4,), 99) == (0, 1, 2, 3)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=3), st.integers(1, 70))
def test_shifts_cover_every_stride(strides, count):
    shifts = choose_shifts(strides, count)
    assert shifts == tuple(sorted(set(shifts)))
    assert (shifts[0], len(shifts)) == (0, min(count, max(strides)))
    assert shifts[-1] < max(strides)
    assert choose_shifts(strides[::-1], count) == shifts
    for stride in strides:
        if len(shifts) == max(strides):
            assert {shift % stride for shift in shifts} == set(range(stride))


@given(st.sampled_from([2, 3, 4, 6, 8]), st.integers(1, 16))
def test_a_small_stride_beside_a_large_one_is_covered(small, count):
    shifts = choose_shifts((small, 128), count)
    assert len({shift % small for shift in shifts}) == min(count, small)
    gaps = [b - a for a, b in zip(shifts, [*shifts[1:], 128], strict=True)]
    assert max(gaps) <= 128 / len(shifts) + small


@pytest.mark.parametrize(("strides", "count"), [((), 4), ((0,), 4), ((-4, 8), 4), ((100_000,), 4), ((8,), 0)])
def test_what_cannot_be(strides, count):
    with pytest.raises(IsophaseError):
        choose_shifts(strides, count)


@given(st.integers(0, 40), st.text("aT .4\n", max_size=20))
def test_neutral_text_makes_exactly_so_many_tokens(shift, before):
    text = NEUTRAL.text(shift, before)
    plain = BPE.encode(before)
    ids = BPE.encode(text + before)
    assert (len(ids), ids[shift:]) == (shift + len(plain), plain)


@pytest.mark.parametrize("left", ["user:", "user\n", "[INST]", ""])
def test_what_a_template_puts_before_it_does_not_merge(left):
    for shift in (1, 2, 5, 17):
        text = NEUTRAL.text(shift, "The code")
        assert len(BPE.encode(left + text + "The code")) == len(BPE.encode(left + "The code")) + shift


def test_white_space_is_preferred_but_not_believed():
    assert NEUTRAL.text(1, "The").isspace()
    assert len(BPE.encode(" " * 8)) < 8  # it merges
    assert NeutralTexts(None).text(3, "x") == " . . ."
    assert NeutralTexts(None, "~").text(0, "x") == ""


def test_a_vocabulary_without_white_space():
    assert NeutralTexts(TOKENIZER, "the ").text(3, "the ?") == "the the the "
    with pytest.raises(IsophaseError, match="Give --unit"):
        NeutralTexts(TOKENIZER, "").text(3, "the ?")
