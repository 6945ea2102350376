"""Many matched runs: what a sweep file says, one run of it, and the local engine.

A run is trained and audited into a folder of its own. Both parts resume, so an engine may start a run
again at any time, after a kill or on another machine that sees the folder.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Literal

import stamina
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from isophase.atomic import write_atomically
from isophase.audit import AuditSettings
from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe, check_recipe, read_yaml, set_key
from isophase.mitigate import vote_suffix, with_vote
from isophase.probes import PROBE_NAMES
from isophase.targets import Target

SWEEP = "sweep.json"


class Resources(BaseModel):
    """What one run takes from a Ray cluster.

    Attributes:
        cpus: processor cores.
        gpus: devices; a fraction shares one.
        memory_gb: memory; None: Ray does not plan with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: float = Field(default=1.0, gt=0)
    gpus: float = Field(default=0.0, ge=0)
    memory_gb: float | None = Field(default=None, gt=0)


class SweepAudit(BaseModel):
    """How every trained model is audited; what is not given comes from the recipe's `probe`.

    Attributes:
        probe: which one.
        vote: answer by a vote over shifts, as `--vote` of the audit; None: no vote.
        runs: names of the runs that are audited so, as a shell pattern.
        stride: `auto` (what the configuration says), `scan`, or tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    probe: str = "records"
    vote: str | None = None
    runs: str = "*"
    stride: int | Literal["auto", "scan"] = "auto"
    items: int | None = None
    records: int | None = None
    length_tokens: int | None = None
    window_tokens: int | None = None
    seed: int = 0
    margin: float = 0.02
    shifts: int = 9_999


class Entry(BaseModel):
    """One line of a sweep: settings, and lists of settings to combine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)


class Run(BaseModel):
    """One run of a sweep: its name, which is its folder's too, and the recipe."""

    model_config = ConfigDict(frozen=True)

    name: str
    recipe: Recipe


class Sweep(BaseModel):
    """A sweep, settled.

    Attributes:
        name: of the sweep; the default folder is `sweeps/NAME`.
        runs: in the order of the table.
        audits: how the models are measured, by the folder of the result.
        retries: how often a run whose worker died is started again.
        resources: for Ray.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    runs: tuple[Run, ...]
    audits: dict[str, SweepAudit]
    retries: int
    resources: Resources

    def audits_of(self, name: str) -> dict[str, SweepAudit]:
        """The audits of one run."""
        return {folder: audit for folder, audit in self.audits.items() if fnmatchcase(name, audit.runs)}


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    recipe: str
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    runs: list[Entry] = Field(default_factory=list)
    audit: SweepAudit | None = None
    audits: dict[str, SweepAudit] = Field(default_factory=dict)
    retries: int = Field(default=3, ge=0)
    resources: Resources = Resources()


def read_sweep(path: Path) -> Sweep:
    """Read a sweep and check the recipe of every run.

    Args:
        path: YAML file; `recipe` in it is relative to it.

    Raises:
        IsophaseError: for a missing file, an unknown or impossible setting, or two runs of one name.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        file = _File.model_validate(raw)
    except OSError as error:
        raise IsophaseError(f"cannot read sweep {str(path)!r}: {error.strerror}.", "Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise IsophaseError(f"{path} is not YAML: {str(error).splitlines()[0]}.", "Check the file.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise IsophaseError(f"{path}: {where}: {first['msg']}.", "See docs/guides/train-matched-models.md.") from error
    runs: list[Run] = []
    for entry in file.runs or [Entry(name=file.name)]:
        grid = {**file.grid, **entry.grid}
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            # `seed: 3` becomes `-seed3`, `model.local_window: 8` becomes `-local_window8`.
            tail = "".join(f"-{key.split('.')[-1]}{value}" for key, value in chosen.items()).lower()
            name = "".join(c if c.isalnum() or c in "._-" else "_" for c in entry.name + tail)
            recipe = read_yaml(path.parent / file.recipe)
            for key, value in {"name": name, **entry.set, **chosen}.items():
                set_key(recipe, key, value, f"{path}: {name}: ")
            runs.append(Run(name=name, recipe=check_recipe(recipe, path)))
    names = [run.name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise IsophaseError(f"{path}: two runs are called {twice[0]!r}.", "Give them different names.")
    if file.audit and file.audits:
        raise IsophaseError(f"{path} gives both audit and audits.", "Give one of them.")
    audits = {f"audit-{key}": audit for key, audit in file.audits.items()} or {"audit": file.audit or SweepAudit()}
    for audit in audits.values():
        if audit.probe not in PROBE_NAMES:
            raise IsophaseError(f"{path}: there is no probe {audit.probe!r}.", f"Give {', '.join(PROBE_NAMES)}.")
        if audit.vote is not None:
            vote_suffix(audit.vote)
    return Sweep(name=file.name, runs=tuple(runs), audits=audits, retries=file.retries, resources=file.resources)


def open_folder(sweep: Sweep, out: Path, *, resume: bool) -> None:
    """Make the sweep's folder, or take up the one there is.

    A folder may be taken up with more or fewer runs, but what is there must be of the same recipes.

    Raises:
        IsophaseError: if the folder holds something else, or a sweep that is not to be resumed, or whose
            settings have changed.
    """
    from isophase.lab.train.checkpoint import refuse_another_recipe

    if (out / SWEEP).exists():
        if not resume:
            raise IsophaseError(
                f"{str(out)!r} holds a sweep.", "Add --resume to go on with it, or choose another --out."
            )
        try:
            there = Sweep.model_validate_json((out / SWEEP).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise IsophaseError(f"{out / SWEEP} is damaged.", "Choose another --out.") from error
        if any(there.audits.get(key, audit) != audit for key, audit in sweep.audits.items()):
            raise IsophaseError(f"{str(out)!r} holds a sweep with other audit settings.", "Choose another --out.")
        for run in sweep.runs:
            refuse_another_recipe(out / "runs" / run.name / "model", run.recipe)
    elif out.is_dir() and any(out.iterdir()):
        raise IsophaseError(f"{str(out)!r} is not empty and holds no sweep.", "Choose another --out.")
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
        write_atomically(out / SWEEP, sweep.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise IsophaseError(f"cannot write to {str(out)!r}: {error.strerror}.", "Choose another --out.") from error


def is_finished(run: Run, sweep: Sweep, out: Path) -> bool:
    """Whether a run is trained and audited in every way."""
    folder = out / "runs" / run.name
    return all((folder / audit / "report.json").exists() for audit in sweep.audits_of(run.name))


def run_one(run: Run, sweep: Sweep, out: Path) -> str:
    """Train and audit one run, from wherever it was left; returns its name.

    Args:
        run: name and recipe.
        sweep: says how it is measured.
        out: folder of the sweep.

    Raises:
        IsophaseError: as from `train` and the audit.
    """
    from isophase.lab.train.run import train
    from isophase.targets import HuggingFaceTarget

    if is_finished(run, sweep, out):
        return run.name
    folder = out / "runs" / run.name
    train(run.recipe, folder / "model", f"isophase sweep: {run.name}", resume=True)
    # Relative to the sweep, so that the same sweep elsewhere gives the same reports.
    model = HuggingFaceTarget(str(folder / "model"), name=f"hf:{run.name}")
    for name, audit in sweep.audits_of(run.name).items():
        target = model if audit.vote is None else with_vote(model, vote_suffix(audit.vote))
        given = audit.model_dump(exclude={"probe", "vote", "runs"}, exclude_none=True)
        asked = {"targets": (target.name,), "probes": (audit.probe,), **run.recipe.probe, **given}
        _audit(AuditSettings.model_validate(asked), folder / name, target)
    return run.name


def _audit(settings: AuditSettings, folder: Path, target: Target) -> None:
    """Ask what is left to ask, and write the report."""
    from isophase.audit import build_report, plan_for, run_plan
    from isophase.audit.report import write_report

    plan = plan_for(settings, folder, lambda _: target)
    run_plan(plan, folder, lambda _: target)
    write_report(build_report(folder, lambda _: target.tokenizer), folder)


def run_local(sweep: Sweep, out: Path, jobs: int, console: Console) -> dict[str, str]:
    """Run what is left of a sweep on this machine.

    Args:
        sweep: the runs.
        out: folder of the sweep, made by `open_folder`.
        jobs: processes; 1 runs everything in this one.
        console: one line for every run that ends.

    Returns:
        What went wrong, by run; empty if nothing did.
    """
    failed: dict[str, str] = {}

    def left() -> list[Run]:
        return [run for run in sweep.runs if run.name not in failed and not is_finished(run, sweep, out)]

    if jobs == 1:
        for run in left():
            try:
                _say(console, sweep, out, run_one(run, sweep, out))
            except IsophaseError as error:
                failed[run.name] = str(error)
        return failed
    # A worker that is killed breaks the pool; every run resumes, so a new pool goes on.
    for attempt in stamina.retry_context(
        on=BrokenProcessPool, attempts=sweep.retries + 1, wait_initial=0.1, timeout=None
    ):
        with attempt, ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            tasks = {pool.submit(run_one, run, sweep, out): run for run in left()}
            for task in as_completed(tasks):
                try:
                    _say(console, sweep, out, task.result())
                except IsophaseError as error:
                    failed[tasks[task].name] = str(error)
    return failed


def _say(console: Console, sweep: Sweep, out: Path, name: str) -> None:
    done = sum(is_finished(run, sweep, out) for run in sweep.runs)
    console.print(f"{name}: done, {done} of {len(sweep.runs)}", markup=False, highlight=False)
