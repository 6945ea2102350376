"""Late chunking against a slow reading of the paper, and what must hold for every text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.chunking.rules import FixedStride, LocalMaximum, NeighbourCosine, Threshold, TokenHash
from isophase.errors import IsophaseError
from isophase.retrieval import Delimiters, Encoder, LateChunker, Sentences
from isophase.retrieval.late.pooling import unit
from isophase.retrieval.late.spans import cut
from isophase.retrieval.late.tokens import Tokens, windows

RULES = [
    FixedStride(stride_tokens=5),
    FixedStride(stride_tokens=7, shift_tokens=3),
    FixedStride(stride_tokens=1),
    LocalMaximum(score=TokenHash(), radius_tokens=3, max_tokens=12),
    Threshold(score=TokenHash(), threshold=1.5e9, max_tokens=9),
    LocalMaximum(score=NeighbourCosine(), radius_tokens=2, max_tokens=12),
    Sentences(max_tokens=16),
    Delimiters(max_tokens=12, radius_tokens=2),
]
PIECES = [
    "The chunk starts here. ", "Nothing is lost!\n\n", "中文句子。", "日本語、", "😀", "👩‍👩‍👧 ",
    "naïve café — ", "def f(x):\n    return x\n",
    "[SEP] ", "[CLS]", "<s>", "\t", "   ", "\u200b", "e\u0301", "ﬁ", "Ωmega; ", "a" * 30, "\r\n", "x",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.just("word " * 60)
)


@pytest.fixture(scope="module", params=["bert", "bytes"])
def encoder(request: pytest.FixtureRequest, model_folder: Path, byte_folder: Path) -> Encoder:
    return Encoder(str(model_folder if request.param == "bert" else byte_folder), batch_tokens=96)


def oracle_outputs(encoder: Encoder, ids: list[int], overlap: int) -> tuple[list, list, list]:
    """Outputs before the text, of its tokens, and behind it: windows one by one, overlap dropped."""
    head, tail = encoder.documents.head_ids.tolist(), encoder.documents.tail_ids.tolist()
    room = encoder.window_tokens - len(head) - len(tail)
    before, own, behind = [], [], []
    start = 0
    while True:
        part = ids[start : start + room]
        with torch.inference_mode():
            out = encoder.model(input_ids=torch.tensor([head + part + tail])).last_hidden_state[0].double().numpy()
        middle = list(out[len(head) : len(head) + len(part)])
        own += middle if start == 0 else middle[overlap:]
        before = before if start else list(out[: len(head)])
        behind = list(out[len(out) - len(tail) :])
        if start + room >= len(ids):
            return before, own, behind
        start += room - overlap


def oracle(encoder: Encoder, ids: list[int], spans: list[tuple[int, int]], overlap: int) -> np.ndarray:
    before, own, behind = oracle_outputs(encoder, ids, overlap)
    assert len(own) == len(ids)
    rows = []
    for n, (start, end) in enumerate(spans):
        group = own[start:end]
        group = before + group if n == 0 else group
        group = group + behind if n == len(spans) - 1 else group
        mean = np.mean(group, axis=0)
        rows.append(mean / np.linalg.norm(mean) if encoder.normalises else mean)
    return np.array(rows)


@settings(max_examples=40, deadline=None)
@given(text=TEXTS, rule=st.sampled_from(RULES), overlap=st.integers(0, 20))
def test_late_vectors_are_those_of_the_paper(encoder: Encoder, text: str, rule, overlap: int) -> None:
    chunks = LateChunker(encoder, rule=rule, overlap_tokens=overlap).encode([text])
    ids = encoder.documents.read(text).ids_T.tolist()
    spans = [(c.start_token, c.end_token) for c in chunks]
    # Every token in exactly one span, every character in exactly one chunk.
    assert [t for start, end in spans for t in range(start, end)] == list(range(len(ids)))
    if not ids:
        assert chunks == []
        return
    assert "".join(c.text for c in chunks) == text
    assert all(c.text == text[c.start_char : c.end_char] for c in chunks)
    expected = oracle(encoder, ids, spans, overlap)
    np.testing.assert_allclose(np.stack([c.vector for c in chunks]), expected, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(text=TEXTS, overlap=st.integers(0, 20), rule=st.sampled_from(RULES))
def test_naive_whole_and_blended(encoder: Encoder, text: str, overlap: int, rule) -> None:
    made = {
        mode: LateChunker(encoder, rule=rule, mode=mode, overlap_tokens=overlap, late_weight=0.3).encode([text])
        for mode in ("late", "naive", "whole", "blended")
    }
    ids = encoder.documents.read(text).ids_T.tolist()
    assert len(made["whole"]) == (1 if ids else 0)
    if not ids:
        return
    np.testing.assert_allclose(made["whole"][0].vector, oracle(encoder, ids, [(0, len(ids))], overlap)[0], atol=2e-5)
    for chunk in made["naive"]:
        own = ids[chunk.start_token : chunk.end_token]
        np.testing.assert_allclose(chunk.vector, oracle(encoder, own, [(0, len(own))], overlap)[0], atol=2e-5)
    for late, naive, blended in zip(made["late"], made["naive"], made["blended"], strict=True):
        expected = unit(0.3 * unit(late.vector) + 0.7 * unit(naive.vector))
        np.testing.assert_allclose(blended.vector, expected, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_windows_keep_every_token_once(tokens: int, capacity: int, data) -> None:
    overlap = data.draw(st.integers(0, capacity - 1))
    made = list(windows(tokens, capacity, overlap))
    assert [t for w in made for t in range(w.keep_from, w.end)] == list(range(tokens))
    assert all(w.end - w.start <= capacity and w.keep_from >= w.start for w in made)
    assert all(w.keep_from - w.start == overlap for w in made[1:])
    assert [w.first for w in made] == [n == 0 for n in range(len(made))]
    assert [w.last for w in made] == [n == len(made) - 1 for n in range(len(made))]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_document_does_not_depend_on_its_neighbours(encoder: Encoder, rule) -> None:
    texts = [
        "The chunk starts here. " * 9,
        "",
        "x",
        "中文句子。日本語のテキスト、絵文字 😀 " * 5,
        "Nothing is lost! " * 3,
    ]
    together = LateChunker(encoder, rule=rule).encode(texts)
    for number, text in enumerate(texts):
        alone = LateChunker(encoder, rule=rule).encode([text])
        mine = [c for c in together if c.document == number]
        assert [(c.start_token, c.text) for c in mine] == [(c.start_token, c.text) for c in alone]
        for a, b in zip(mine, alone, strict=True):
            np.testing.assert_allclose(a.vector, b.vector, atol=2e-5)


def test_several_grids_from_one_reading(encoder: Encoder, monkeypatch) -> None:
    text = "The chunk starts where the text says so; nothing else decides. " * 6
    single = [
        LateChunker(encoder, rule=FixedStride(stride_tokens=8, shift_tokens=shift)).encode([text])
        for shift in (0, 2, 4, 6)
    ]
    read = []
    inner = Encoder.vectors
    monkeypatch.setattr(Encoder, "vectors", lambda self, inputs: read.append(len(inputs)) or inner(self, inputs))
    multi = LateChunker(encoder, rule=FixedStride(stride_tokens=8), offsets=4).encode([text])
    assert len(read) == 1
    expected = [c for chunks in single for c in chunks]
    assert [(c.shift_tokens, c.start_token) for c in multi] == [(c.shift_tokens, c.start_token) for c in expected]
    holds = [np.repeat([c.vector for c in own], [c.end_token - c.start_token for c in own], axis=0) for own in single]
    mean_of_token = np.mean(holds, axis=0)  # each token: the mean of the chunks that it lies in
    for a, b in zip(multi, expected, strict=True):
        assert a.text == b.text
        mean = mean_of_token[a.start_token : a.end_token].mean(axis=0)
        np.testing.assert_allclose(a.vector, unit(mean) if encoder.normalises else mean, atol=1e-6)
    assert LateChunker(encoder, rule=FixedStride(stride_tokens=8), offsets=4).encode([""]) == []


@settings(max_examples=40, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES[:6] + PIECES[-4:-2]), min_size=20, max_size=60).map(" ".join),
    prefix=st.lists(st.sampled_from(["word ", "Nothing is lost! ", "x, "]), min_size=1, max_size=9).map("".join),
    rule=st.sampled_from([Sentences(max_tokens=400, radius_tokens=3), Delimiters(max_tokens=400, radius_tokens=3)]),
)
def test_starts_move_with_the_text(encoder: Encoder, text: str, prefix: str, rule) -> None:
    short, long = encoder.documents.read(text), encoder.documents.read(prefix + text)
    shift = len(long) - len(short)
    settle = 12  # radius, and the tokens that a mark looks at
    if long.ids_T[shift:].tolist() != short.ids_T.tolist():
        return  # the tokenizer itself joined prefix and text
    mine = set(cut(rule, short).start_token_E[1:].tolist())
    moved = {int(t) - shift for t in cut(rule, long).start_token_E}
    assert {t for t in mine if t > settle} == {t for t in moved if t > settle}


def test_sentences_stay_whole() -> None:
    text = (
        "One short sentence. " + "Another one, with a pause; e.g. this is no end. " * 6 + "「日本語。」次の文。\n\nEnd"
    )
    marks = Sentences(max_tokens=400)
    places = list(range(len(text)))
    tokens = Tokens(  # one token a character
        text=text,
        ids_T=np.array([ord(c) for c in text]),
        start_T=np.array(places),
        end_T=np.array(places) + 1,
    )
    starts = np.flatnonzero(marks.marks(tokens)).tolist()
    assert starts == sorted(
        [text.index("Another") + 48 * n for n in range(6)] + [text.index("「"), text.index("次"), text.index("End")]
    )


def test_questions_are_read_as_the_model_does(encoder: Encoder) -> None:
    chunker = LateChunker(encoder)
    vectors = chunker.encode_queries(["What is late chunking?", "中文"])
    whole = LateChunker(encoder, mode="whole").encode(["What is late chunking?", "中文"])
    np.testing.assert_allclose(vectors, np.stack([c.vector for c in whole]), atol=1e-6)
    with pytest.raises(IsophaseError, match="has no tokens"):
        chunker.encode_queries([""])


def test_a_prompt_is_read_in_every_window_and_counts_as_special(model_folder: Path) -> None:
    plain = Encoder(str(model_folder))
    prompted = Encoder(str(model_folder), document_prompt="text: ", query_prompt="ask: ")
    extra = prompted.documents.head_ids[1:]
    assert extra.tolist() == plain.documents.read("text: ").ids_T.tolist()
    text = "The chunk starts where the text says so. " * 4
    chunks = LateChunker(prompted, rule=FixedStride(stride_tokens=9), overlap_tokens=2).encode([text])
    spans = [(c.start_token, c.end_token) for c in chunks]
    ids = plain.documents.read(text).ids_T.tolist()
    np.testing.assert_allclose(np.stack([c.vector for c in chunks]), oracle(prompted, ids, spans, 2), atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(model_folder: Path, dtype: str) -> None:
    texts = ["The chunk starts where the text says so. " * 4]
    exact = LateChunker(str(model_folder)).encode(texts)
    half = LateChunker(str(model_folder), dtype=dtype).encode(texts)
    for a, b in zip(exact, half, strict=True):
        assert b.vector.dtype == np.float32
        assert float(a.vector @ b.vector) > 0.99
