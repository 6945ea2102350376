"""What a sparse prefill did: density and recall by head, time by part."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from isophase.atomic import write_atomically

Part = Literal["look", "choose", "attend", "dense"]


class HeadRun(BaseModel):
    """One head of one attention call.

    Attributes:
        pattern: what it read, written as in a file of patterns.
        density: keys read by keys that dense attention reads, 0..1.
        recall: share of attention kept on queries that nothing was fitted to, 0..1; None where none were looked at.
    """

    model_config = ConfigDict(frozen=True)

    pattern: str
    density: float
    recall: float | None


class CallRun(BaseModel):
    """One row of one layer's attention.

    Attributes:
        layer: number of the model's layer.
        row: of the batch.
        tokens: keys.
        queries: of this part of the prompt.
        why: `sparse`, or why the row was read densely.
        heads: one entry for each query head; empty where the call was left to the model's own attention.
        saved: time that was saved by looking, as predicted from this machine's costs, by that of dense attention;
            below 0 where looking cost more. 0 where nothing was predicted.
        seconds: of looking at sampled queries, choosing, sparse attention, and dense attention; where heads are read
            side by side, added up over threads.
    """

    model_config = ConfigDict(frozen=True)

    layer: int
    row: int
    tokens: int
    queries: int
    why: str
    heads: tuple[HeadRun, ...] = ()
    saved: float = 0.0
    seconds: dict[Part, float] = Field(default_factory=dict)


class PrefillRun(BaseModel):
    """Every attention call over a prompt while `sparse_prefill` was in force.

    Attributes:
        kind: what this file is.
        patterns: `auto`, or where patterns came from.
        target_recall: of the adaptive mode, else None.
        threshold_tokens: shortest prompt that is read sparsely.
        calls: in order.
    """

    kind: Literal["isophase prefill run"] = "isophase prefill run"
    patterns: str
    target_recall: float | None
    threshold_tokens: int
    calls: list[CallRun] = Field(default_factory=list)

    def density(self) -> float:
        """Mean over all heads of all calls; a dense head counts 1. 1 before anything was read."""
        return _mean([h.density for call in self.calls for h in call.heads] + self._whole(), 1.0)

    def recall(self) -> float:
        """Mean over all heads of all calls; a dense head counts 1."""
        measured = [1.0 if h.recall is None else h.recall for call in self.calls for h in call.heads]
        return _mean(measured + self._whole(), 1.0)

    def worst_recall(self) -> float:
        """Least recall of a head in a call."""
        return min((h.recall for call in self.calls for h in call.heads if h.recall is not None), default=1.0)

    def _whole(self) -> list[float]:
        return [1.0 for call in self.calls if not call.heads]

    def seconds(self) -> dict[str, float]:
        """Time by part."""
        total: Counter[str] = Counter()
        for call in self.calls:
            total.update(call.seconds)
        return dict(total)

    def save(self, path: Path | str) -> None:
        """Write it as JSON, for `isophase prefill show`.

        Raises:
            OSError: as from the file system.
        """
        write_atomically(Path(path), self.model_dump_json(indent=1) + "\n")


class Clock:
    """Adds up the time of parts, of whichever threads.

    Args:
        wait: called before each reading, to wait for a device.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.seconds: dict[Part, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Count the time of a block."""
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        took = time.perf_counter() - began
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + took


def _mean(values: list[float], empty: float) -> float:
    return sum(values) / len(values) if values else empty
