"""Ask the targets what the plan says, resumably."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isophase import __version__
from isophase.audit.plan import OpenTarget, batches, check_settings, make_plan
from isophase.audit.settings import AuditSettings, Part, Plan
from isophase.audit.store import (
    MANIFEST,
    PLAN,
    RunFolder,
    another_plan,
    read_answers,
    read_manifest,
    read_plan,
    refuse_strangers,
    write_error,
)
from isophase.errors import IsophaseError
from isophase.probes import Probe, Prompt, build_probe
from isophase.targets import Answer, SharingTarget, StreamingTarget, Target

# Answers become durable at least this often; a kill then costs at most this much work.
_FLUSH_SECONDS = 1.0


def default_folder(settings: AuditSettings, open_target: OpenTarget) -> Path:
    """The run folder of an audit: equal audits of equal models resume each other, others never meet."""
    lead = settings.targets[0]
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in lead.split("/")[-1])[:40]
    models = [open_target(spec).fingerprint() for spec in settings.targets]
    digest = sha256(f"{__version__} {settings.model_dump_json()} {models}".encode()).hexdigest()[:8]
    return Path("isophase-runs") / f"{name}-{digest}"


def plan_for(settings: AuditSettings, folder: Path, open_target: OpenTarget) -> Plan:
    """The plan of a run folder: the one that it began with, else a new one.

    A resumed run neither repeats its pilot nor lets a pilot that came out otherwise change its prompts.

    Args:
        settings: what the user asked for.
        folder: the run folder; may be missing.
        open_target: opens a target by its spec; a new plan may ask the first one a few questions.

    Raises:
        IsophaseError: for a folder that holds something else, or settings that cannot work.
    """
    check_settings(settings)
    try:
        refuse_strangers(folder)
        begun = (folder / PLAN).exists()
    except OSError as error:
        raise write_error(folder, error) from error
    if not begun:
        return make_plan(settings, open_target, pilot=True)
    plan = read_plan(folder)
    if plan.isophase_version != __version__:
        raise another_plan(folder, f" (of isophase {plan.isophase_version}, this is {__version__})")
    then, now = plan.settings.model_dump(), settings.model_dump()
    for name, value in now.items():
        if then[name] != value:
            raise another_plan(folder, f" ({name} is {then[name]!r} there and {value!r} here)")
    return plan


def run_plan(plan: Plan, folder: Path, open_target: OpenTarget, console: Console | None = None) -> None:
    """Ask every prompt of the plan that the run folder has no answer to.

    Args:
        plan: what to ask.
        folder: the run folder; created, or resumed.
        open_target: opens a target by its spec.
        console: where the progress bar goes; None: none.

    Raises:
        IsophaseError: for a folder that cannot be used, a changed model, a full disk.
    """
    for part in plan.parts:
        if open_target(part.target).fingerprint() != part.fingerprint:
            raise IsophaseError(
                f"{part.target} is not the model that the run in {str(folder)!r} began with (its files have changed).",
                "Run the audit into another --out folder.",
            )
    if (folder / MANIFEST).exists() and read_plan(folder) == plan:
        return
    with RunFolder(folder, plan) as run, _progress(console) as progress:
        done = len(run.answers)
        bar = progress.add_task("asking", total=plan.rows, completed=done, rate="")
        began, asked = time.monotonic(), 0

        def advance(count: int) -> None:
            nonlocal asked
            asked += count
            rate = asked / max(time.monotonic() - began, 1e-9)
            progress.update(bar, advance=count, rate=f"{rate:,.1f} prompts/s")

        facts: dict[str, Any] = {}
        for _, group in groupby(plan.parts, key=lambda part: _shared(part, open_target(part.target))):
            parts = list(group)
            seconds = _take_turns([_run_part(part, open_target(part.target), run, advance) for part in parts])
            for part, spent in zip(parts, seconds, strict=True):
                described = open_target(part.target).describe()
                facts[f"{part.target} {part.probe.probe}"] = {**described, "seconds": round(spent, 3)}
        run.write_manifest(
            {
                "schema_version": 1,
                "isophase": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "platform": platform.platform(),
                "rows": plan.rows,
                "statuses": dict(Counter(answer.status for answer in run.answers.values())),
                "resumed": done > 0,
                "parts": facts,
            }
        )


def _shared(part: Part, target: Target) -> tuple[object, ...]:
    """Equal for parts that can answer from one reading of a batch, and for no others."""
    if isinstance(target, SharingTarget) and target.grouped:
        return target.reading, part.probe.model_dump_json()
    return (part.first_row,)


def _take_turns(runs: Sequence[Iterator[None]]) -> list[float]:
    """Let runs go on in turns, a batch each; returns the seconds that each took."""
    seconds = [0.0] * len(runs)
    going = list(enumerate(runs))
    while going:
        for number, run in list(going):
            began = time.monotonic()
            try:
                next(run)
            except StopIteration:
                going.remove((number, run))
            seconds[number] += time.monotonic() - began
    return seconds


def _run_part(part: Part, target: Target, run: RunFolder, advance: Callable[[int], None]) -> Iterator[None]:
    """Ask one part; yields after every batch, also after one that was answered before."""
    probe = build_probe(part.probe, target.tokenizer)
    if isinstance(target, StreamingTarget):
        _stream_part(part, target, probe, run, advance)
        return
    pending: list[tuple[int, Answer]] = []
    last_flush = time.monotonic()
    for batch in batches(part, probe.window_tokens, target.grouped):
        missing = [row for row in batch if row not in run.answers]
        if not missing:
            yield
            continue
        prompts = [probe.prompt(row - part.first_row) for row in batch]
        answers = _ask(target, prompts)
        pending += [(row, answer) for row, answer in zip(batch, answers, strict=True) if row not in run.answers]
        if time.monotonic() - last_flush >= _FLUSH_SECONDS or target.grouped:
            run.append(pending)
            advance(len(pending))
            pending, last_flush = [], time.monotonic()
        yield
    if pending:
        run.append(pending)
        advance(len(pending))


def _stream_part(
    part: Part, target: StreamingTarget, probe: Probe, run: RunFolder, advance: Callable[[int], None]
) -> None:
    """Ask one part of a target that takes several prompts at a time, and keep what has come whatever happens."""
    rows = [row for (row,) in batches(part, probe.window_tokens, False) if row not in run.answers]
    pending: list[tuple[int, Answer]] = []

    def flush() -> None:
        written, pending[:] = pending[:], []
        run.append(written)
        advance(len(written))

    def prompts() -> Iterator[Prompt]:
        for row in rows:
            yield probe.prompt(row - part.first_row)

    last_flush = time.monotonic()
    try:
        with closing(target.stream(prompts())) as answers:
            for number, answer in answers:
                pending.append((rows[number], answer))
                if time.monotonic() - last_flush >= _FLUSH_SECONDS:
                    flush()
                    last_flush = time.monotonic()
    finally:
        if pending:
            flush()


def _ask(target: Target, prompts: Sequence[Prompt]) -> list[Answer]:
    answers = list(target.answer(prompts))
    assert len(answers) == len(prompts), f"{target.name} gave {len(answers)} answers to {len(prompts)} prompts"
    return answers


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console or Console(quiet=True),
        disable=console is None or not console.is_terminal,
        transient=True,
    )


def load_run(folder: Path) -> tuple[Plan, dict[int, Answer], dict[str, Any] | None]:
    """Everything that a run folder holds: plan, answers by row, manifest (None: not complete)."""
    plan = read_plan(folder)
    answers, _ = read_answers(folder)
    return plan, answers, read_manifest(folder)
