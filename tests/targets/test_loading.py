"""What cannot be loaded is one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from isophase.errors import IsophaseError
from isophase.targets import open_target
from isophase.targets.huggingface import HuggingFaceTarget


@pytest.fixture
def copy(folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder that a test may damage."""
    return Path(shutil.copytree(folder("llama"), tmp_path / "model"))


def refused(make: Callable[[], object], *words: str) -> None:
    with pytest.raises(IsophaseError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.remedy
    assert all(word in message for word in words), message


def test_a_folder_that_is_not_there() -> None:
    refused(lambda: open_target("hf:/no/such/folder"), "/no/such/folder", "does not exist")
    refused(lambda: open_target("hf:./none"), "./none", "does not exist")
    refused(lambda: open_target("hf:~/no-such-folder"), "does not exist")


def test_a_file_instead_of_a_folder(copy: Path) -> None:
    refused(lambda: open_target(f"hf:{copy / 'config.json'}"), "is not a folder")


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(
        lambda: HuggingFaceTarget("no-such-owner/no-such-model"),
        "configuration",
        "no-such-owner/no-such-model",
    )


def test_no_configuration(tmp_path: Path) -> None:
    refused(lambda: open_target(f"hf:{tmp_path}"), "configuration", str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "no_such_type"}', '{"model_type": "llama", "hidden_size": "wide"}']
)
def test_a_configuration_that_cannot_be_read(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    refused(lambda: open_target(f"hf:{copy}"), str(copy), "configuration")


def test_an_impossible_configuration_of_ours(copy: Path) -> None:
    text = {"model_type": "compressed_qwen3", "compression_window": 4, "compression_stride": 8}
    (copy / "config.json").write_text(json.dumps(text))
    refused(lambda: open_target(f"hf:{copy}"), "stride 8", "window 4")


def test_no_tokenizer(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    refused(lambda: open_target(f"hf:{copy}"), "tokenizer", str(copy))


def test_no_gguf_file(copy: Path) -> None:
    refused(lambda: open_target(f"hf:{copy}", gguf_file="model.gguf"), "'model.gguf'", str(copy))


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    target = open_target(f"hf:{copy}")  # planning needs no weights
    refused(lambda: list(target.answer([])) or target.model, "model", str(copy))


def test_weights_that_are_cut_off(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(lambda: HuggingFaceTarget(str(copy)).model, "model", str(copy))


def test_weights_that_lack_parameters(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj.weight"
    del weights[gone]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: HuggingFaceTarget(str(copy)).model, "lack 1 parameters", gone)


def test_weights_of_another_size(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: HuggingFaceTarget(str(copy)).model, "model", str(copy))


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v4", "compressed_qwen3"])
def test_loading_says_nothing(folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str], architecture) -> None:
    was = transformers_logging.is_progress_bar_enabled()
    assert not HuggingFaceTarget(str(folder(architecture)), device="cpu").model.training
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert transformers_logging.is_progress_bar_enabled() == was


@pytest.mark.parametrize("spec", ["", "w8s8", "hf:", "isophase:", "gguf:x", "HF:x"])
def test_unknown_targets(spec: str) -> None:
    refused(lambda: open_target(spec), repr(spec), "hf:PATH_OR_ID")
