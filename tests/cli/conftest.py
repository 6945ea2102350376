"""The command line, called in this process where that is enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import isophase as package
from isophase.cli.main import main

SOURCE = Path(package.__file__).parents[1]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def isophase(monkeypatch, capsys, tmp_path):
    """Run a command below `tmp_path`; exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISOPHASE_DEBUG", raising=False)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["isophase", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        return Result(code, *capsys.readouterr())

    yield call
    os.environ.pop("ISOPHASE_DEBUG", None)  # `--debug` sets it


@pytest.fixture
def process(tmp_path):
    """Start the command as a process of its own."""

    def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "isophase.cli.main", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(SOURCE)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        # A shell's background jobs ignore Ctrl-C, and their children inherit that.
        heeds_interrupts = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        return subprocess.Popen(command, env=environment, **(pipes | heeds_interrupts | options))

    return start


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    """Make the configuration and tokenizer of a model: all that planning reads."""
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from isophase.models.config import CompressedQwen3Config
    from isophase.probes.pairs import WORDS

    def make(words: tuple[str, ...] = WORDS, record_style: str | None = "pairs", weights: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("model")
        config = CompressedQwen3Config(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            record_style=record_style,
        )
        config.save_pretrained(folder)
        inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
        ).save_pretrained(folder)
        if weights:
            import torch

            from isophase.models.qwen3 import CompressedQwen3ForCausalLM

            torch.manual_seed(0)
            CompressedQwen3ForCausalLM(config).save_pretrained(folder)
        return folder

    return make
