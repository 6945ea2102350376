"""The Ray engine of `isophase sweep`: a cluster where there is one, this machine otherwise.

Source: https://docs.ray.io/en/latest/ray-core/fault-tolerance.html
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from isophase.errors import IsophaseError
from isophase.lab.sweep.grid import Run, Sweep, is_finished, run_one


def run_on_ray(sweep: Sweep, out: Path, console: Console) -> dict[str, str]:
    """Run what is left of a sweep, one task per run.

    Ray starts a task again when its worker dies, up to `retries` times; the run then resumes from its
    checkpoint. On a cluster, `out` must lie on a disk that all machines share.

    Args:
        sweep: the runs, and the resources of one.
        out: folder of the sweep.
        console: one line for every run that ends.

    Returns:
        What went wrong, by run; empty if nothing did.

    Raises:
        IsophaseError: where Ray is not installed.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise IsophaseError(
            "--engine ray needs ray, which is not installed.", "pip install 'isophase[sweep]'."
        ) from error
    began = not ray.is_initialized()
    if began:
        # "auto" would fail without a cluster; no address starts one on this machine.
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    needs = sweep.resources
    memory = {} if needs.memory_gb is None else {"memory": int(needs.memory_gb * 1e9)}
    task = ray.remote(_run_one).options(num_cpus=needs.cpus, num_gpus=needs.gpus, max_retries=sweep.retries, **memory)
    out = out.resolve()
    failed: dict[str, str] = {}
    try:
        waiting = {task.remote(run, sweep, out): run.name for run in sweep.runs if not is_finished(run, sweep, out)}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            name = waiting.pop(ready)
            try:
                problem = ray.get(ready)
            except ray.exceptions.RayError as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if problem:
                failed[name] = problem
            else:
                done = sum(is_finished(run, sweep, out) for run in sweep.runs)
                console.print(f"{name}: done, {done} of {len(sweep.runs)}", markup=False, highlight=False)
    finally:
        if began:
            ray.shutdown()
    return failed


def _run_one(run: Run, sweep: Sweep, out: Path) -> str:
    """What went wrong, in words; empty if nothing did. Faults that a user can mend are not retried."""
    try:
        run_one(run, sweep, out)
    except IsophaseError as error:
        return str(error)
    return ""
