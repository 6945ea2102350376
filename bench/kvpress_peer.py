"""kvpress 0.5.5 in an environment of its own, asked over a pipe: it needs a transformers older than ours.

    make kvpress                                     builds .venv-kvpress
    .venv-kvpress/bin/python bench/kvpress_peer.py   answers JSON lines; nothing of isophase is imported

`KvpressPeer` starts that process. Its questions: which places a press keeps, and how long reading and decoding take.
A budget in entries becomes the ratio that makes kvpress keep so many: its ratios are floored in binary, so half an
entry is added.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"


class KvpressPeer:
    """The other process, with one model.

    Args:
        folder: of the model.
        dtype: such as `float32`.
        clock: `wall` or `cpu`, as in bench/cache.py.
        python: interpreter of the environment with kvpress.

    Raises:
        FileNotFoundError: if that environment is not there.
    """

    def __init__(self, folder: Path | str, dtype: str, clock: str = "wall", python: Path = PYTHON) -> None:
        if not python.exists():
            raise FileNotFoundError(f"{python} is missing: make kvpress")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(python), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions: dict[str, Any] = self._ask({"folder": str(folder), "dtype": dtype, "clock": clock})

    def kept(self, ids: list[int], press: dict[str, Any]) -> list[list[list[int]]]:
        """Places that a press keeps, by layer and KV head."""
        places: list[list[list[int]]] = self._ask({"do": "kept", "ids": ids, "press": press})["places"]
        return places

    def time(self, ids: list[int], press: dict[str, Any] | None, decoded: int) -> dict[str, Any]:
        """Seconds to read, seconds per decoded token, and bytes of keys and values after both."""
        return self._ask({"do": "time", "ids": ids, "press": press, "decoded": decoded})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith('{"answer": '):
                answer: dict[str, Any] = json.loads(line)["answer"]
                return answer
        raise RuntimeError(f"kvpress ended with code {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def press_of(settings: dict[str, Any], length: int) -> Any:
    """SnapKV or ChunkKV that keeps `budget` entries of `length`; ChunkKV in whole chunks of its grid."""
    from kvpress import ChunkKVPress, SnapKVPress

    budget, chunk = settings["budget"], settings.get("chunk_tokens")
    kept, whole = (budget, length) if chunk is None else (budget // chunk, -(-length // chunk))
    snap = SnapKVPress(
        compression_ratio=1 - (kept + 0.5) / whole, window_size=settings["window_tokens"],
        kernel_size=settings["kernel_tokens"],
    )  # fmt: skip
    return snap if chunk is None else ChunkKVPress(press=snap, chunk_length=chunk)


def places_kept(model: Any, ids: Any, press: Any) -> list[list[list[int]]]:
    """By comparison of the kept keys with all keys: kvpress does not say which it keeps."""
    from transformers import DynamicCache

    caches = []
    for context in (nullcontext(), press(model)):
        cache = DynamicCache()
        with context:
            model.model(input_ids=ids, past_key_values=cache)
        caches.append(cache)
    out = []
    for whole, some in zip(caches[0].layers, caches[1].layers, strict=True):
        same = (some.keys[0][:, :, None] == whole.keys[0][:, None]).all(-1)  # [K, kept, all]
        assert bool((same.sum(-1) == 1).all()), "a kept key is not one of the keys, or of two"
        out.append(same.int().argmax(-1).sort(-1).values.tolist())
    return out


def timed(model: Any, ids: Any, press: Any, decoded: int, now: Callable[[], float]) -> dict[str, Any]:
    """One reading and `decoded` tokens, as kvpress's own pipeline does it."""
    import torch
    from transformers import DynamicCache

    cache, length = DynamicCache(), ids.shape[1]
    began = now()
    with nullcontext() if press is None else press(model):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    read = now()
    for n in range(decoded):
        model(input_ids=ids[:, n : n + 1], past_key_values=cache, position_ids=torch.tensor([[length + n]]))
    ended = now()
    stored = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    return {"prefill_s": read - began, "decode_s": (ended - read) / decoded, "bytes": stored}


def serve() -> None:
    import kvpress
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    assert Path(kvpress.__file__).is_relative_to(sys.prefix)
    transformers.utils.logging.disable_progress_bar()
    first = json.loads(sys.stdin.readline())
    now = time.process_time if first["clock"] == "cpu" else time.perf_counter
    model = AutoModelForCausalLM.from_pretrained(first["folder"], dtype=getattr(torch, first["dtype"])).eval()
    facts = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"answer": facts}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            ids = torch.tensor([request["ids"]])
            press = request["press"] and press_of(request["press"], ids.shape[1])
            if request["do"] == "kept":
                answer: dict[str, Any] = {"places": places_kept(model, ids, press)}
            else:
                answer = timed(model, ids, press, request["decoded"], now)
            print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    serve()
