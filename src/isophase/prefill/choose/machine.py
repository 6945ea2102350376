"""What attention costs on this machine, measured once and kept in the user's cache folder.

Sparse attention must never lose: the length from which it is tried, and whether a plan pays, come from these costs.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from isophase.atomic import write_atomically
from isophase.prefill.execution.blocked import attend_blocked, attend_dense
from isophase.prefill.execution.plan import Plan
from isophase.prefill.execution.threads import threads
from isophase.prefill.sample import Geometry, Sampling

# Looking at sampled queries may cost this share of dense attention; where nothing comes of it, it is given up after a
# few layers (`isophase.prefill.choose.ledger`).
_LOOK_SHARE = 1 / 6
# A head is attended to sparsely where that is predicted to take at most this share of dense attention.
PAYS_BELOW = 0.85
_TOKENS, _KEYS, _ROUNDS, _SECONDS = 4096, 1024, 3, 0.1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that attention of one head takes on one thread.

    Attributes:
        dense: dense causal attention, per pair of a query and a key.
        blocked: attention along a plan, per pair, making its calls included.
        looked: looking at a prompt and choosing, however long it is.
        looked_token: what each token of the prompt adds to that.
    """

    dense: float
    blocked: float
    looked: float
    looked_token: float

    def threshold_tokens(self, threads: int = 1) -> int:
        """Shortest prompt that is looked at: below, looking alone would cost more than a sixth of dense attention.

        Args:
            threads: that attend to one head, of which one looks: 1 where there are no fewer heads than threads.
        """
        # The larger root of looked + looked_token t = share dense t^2 / 2.
        dense = self.dense * _LOOK_SHARE / threads
        half = self.looked_token / dense
        exact = half + (half**2 + 2 * self.looked / dense) ** 0.5
        return max(256, -(-int(exact) // 256) * 256)

    def look_share(self, geometry: Geometry, threads: int = 1) -> float:
        """Time of looking at one head, by that of dense attention.

        Args:
            geometry: of the prompt.
            threads: as in `threshold_tokens`.
        """
        dense = self.dense * geometry.queries * (geometry.first_query + geometry.queries / 2)
        return threads * (self.looked + self.looked_token * geometry.tokens) / dense

    def sparse_share(self, keys_per_query: float, geometry: Geometry) -> float:
        """Predicted time of a plan for one head, by that of dense attention.

        Args:
            keys_per_query: read before the own block.
            geometry: of the prompt.
        """
        dense = self.dense * (geometry.first_query + geometry.queries / 2)
        return self.blocked * (keys_per_query + geometry.query_tokens / 2) / dense


def costs_of(width: int, dtype: torch.dtype, *, folder: Path | None = None) -> Costs:
    """This machine's costs, from the cache or measured, which takes about a second.

    Args:
        width: head size.
        dtype: of queries, keys and values.
        folder: where they are kept; default `isophase` in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    return _costs(width, dtype, folder or cache_folder())


def cache_folder() -> Path:
    """The user's cache folder of this program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isophase"


@cache
def _costs(width: int, dtype: torch.dtype, folder: Path) -> Costs:
    name = f"{platform.node()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
    key = f"{name} one thread width {width} {str(dtype).removeprefix('torch.')}"
    file = folder / "prefill.json"
    known = _read(file)
    try:
        return Costs(**known[key])
    except (KeyError, TypeError):
        pass
    costs = measure(width, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(_read(file) | {key: asdict(costs)}, indent=2) + "\n")
    except OSError:
        pass  # a folder that cannot be written costs a measurement each time, and nothing else
    return costs


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def measure(width: int, dtype: torch.dtype) -> Costs:
    """Measure dense and blocked attention and looking in turns; the fastest round of each counts.

    Processor time of one thread is taken, so that other work on the machine does not decide for months what is sparse.

    Args:
        width: head size.
        dtype: of queries, keys and values.
    """
    from isophase.prefill.choose.adapt import Adaptive  # it is part of what is measured
    from isophase.prefill.sample import sample_head

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, _TOKENS, width, generator=generator).to(dtype) for _ in range(3))
    geometry = Geometry(tokens=_TOKENS)
    far_QN = geometry.distance_QN(geometry.starts_Q)
    plan = Plan(
        blocks_HQN=((far_QN >= 0) & (far_QN <= _KEYS // 2 // geometry.key_tokens))[None],
        columns=(torch.arange(_KEYS // 2),), tokens=_TOKENS, first_query=0,
        query_tokens=geometry.query_tokens, key_tokens=geometry.key_tokens,
    )  # fmt: skip
    pairs = float(plan.density().sum()) * _TOKENS * _TOKENS / 2

    def look(tokens: int) -> None:
        part = Geometry(tokens=tokens)
        Adaptive().choose(sample_head(query[0, :tokens], key[0, :tokens], part, Sampling(), scaling=width**-0.5))

    parts: dict[str, tuple[Callable[[], object], float]] = {
        "dense": (lambda: attend_dense(query, key, value), _TOKENS * _TOKENS / 2),
        "blocked": (lambda: attend_blocked(query, key, value, plan), pairs),
        "short": (lambda: look(_TOKENS // 4), 1.0),
        "long": (lambda: look(_TOKENS), 1.0),
    }
    best = dict.fromkeys(parts, float("inf"))
    with torch.inference_mode(), threads(1):
        for _ in range(_ROUNDS):
            for name, (part, size) in parts.items():
                # Short parts run more often: an interruption would change them most.
                end = time.perf_counter() + _SECONDS
                while True:
                    began = time.process_time()
                    part()
                    best[name] = min(best[name], (time.process_time() - began) / size)
                    if time.perf_counter() >= end:
                        break
    token = max(0.0, best["long"] - best["short"]) / (_TOKENS * 3 / 4)
    return Costs(
        dense=best["dense"], blocked=best["blocked"], looked_token=token,
        looked=max(0.0, best["long"] - token * _TOKENS),
    )  # fmt: skip
