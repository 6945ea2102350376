"""Helpers of several test folders: `tests/support` is importable."""

from __future__ import annotations

import sys
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
    from isophase.targets import server_http

    monkeypatch.setattr(server_http, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(server_http, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(server_http, "JITTER_SECONDS", 0.01)
    monkeypatch.setattr(server_http, "ATTEMPTS", 3)
