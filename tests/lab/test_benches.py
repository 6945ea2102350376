"""The benches of memories run to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_what_a_gpu_would_run_runs_here(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH / "gpu.py"), "--device", "cpu", "--tiny", "--minutes", "30"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--json", str(result)], check=True, cwd=tmp_path, env=environment, timeout=1800)
    found = json.loads(result.read_text())
    assert len(found["executors"]) == 2 * 6 * 4
    assert all(row["equal"] for row in found["executors"])
    assert {row["probe"] for row in found["cure"]} == {"records", "prefix"}
    assert len(found["text"]) == 2
