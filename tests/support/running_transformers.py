"""`transformers serve`, a real server that takes text only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

_START_SECONDS = 600


@contextmanager
def transformers_serve(model: Path, log: Path) -> Iterator[str]:
    """Serve a model in float32; yields the URL that ends in /v1. The test is left out where it does not start.

    Args:
        model: folder of the model.
        log: file for what the server says.
    """
    command = shutil.which("transformers", path=os.path.dirname(sys.executable))  # noqa: PTH120
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [command, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*arguments, "--dtype", "float32"],
            stdout=stream,
            stderr=stream,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            try:
                if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.5)
        else:
            pytest.skip(f"transformers serve does not start here: {log.read_text()[-500:]}")
        yield f"{url}/v1"
    finally:
        process.kill()
        process.wait()
