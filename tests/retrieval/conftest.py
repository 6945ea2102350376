"""A tiny random encoder with a tokenizer trained on the spot, in BERT's and in GPT's way of cutting words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

CORPUS = [
    "The chunk starts where the text says so. Nothing else decides, and no token is lost!",
    "def pool(vectors, spans):\n    return [vectors[a:b].mean(0) for a, b in spans]\n",
    "Ünïcode, 中文句子。日本語のテキスト、絵文字 😀 naïve café — “quotes”.",
    "What is late chunking? It reads the whole document; then it cuts.",
] * 4
WINDOW = 24


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def bytes_bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<pad>", "<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


def make(folder: Path, tokenizer: PreTrainedTokenizerFast, modules: bool) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = BertConfig(
            vocab_size=400, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=WINDOW, initializer_range=0.6,
        )  # fmt: skip
        BertModel(config, add_pooling_layer=False).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if modules:
        names = ("Transformer", "Pooling", "Normalize")
        kind = "sentence_transformers.models."
        listed = [{"idx": n, "path": f"{n}_{name}" if n else "", "type": kind + name} for n, name in enumerate(names)]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps(
                {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
            )
        )
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with windows of 24 tokens, saved as sentence-transformers saves it."""
    return make(tmp_path_factory.mktemp("bert"), wordpiece(), modules=True)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network over bytes, without normalisation, and with a special token on one side only."""
    return make(tmp_path_factory.mktemp("bytes"), bytes_bpe(), modules=False)
