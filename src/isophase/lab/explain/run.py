"""`explain`: where in a model its phase effect comes from. Measures; `explain_page` draws what it finds.

Legend: I items, S phases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from isophase import __version__
from isophase.audit import AuditSettings, make_plan
from isophase.errors import IsophaseError
from isophase.lab.explain import causes, cycling, gates, knockout
from isophase.lab.explain.anatomy import GateBranch, gate_branches
from isophase.lab.explain.curves import curve_of, not_applicable
from isophase.lab.explain.cycling import Rolls
from isophase.lab.explain.outcomes import Questions, questions_of
from isophase.lab.explain.schema import (
    Cause,
    CauseName,
    Cycling,
    CyclingShift,
    Explanation,
    GateProfile,
    Knockout,
    PooledFit,
    TrainingStep,
)
from isophase.lab.explain.words import summary
from isophase.probes import ProbeSettings, build_probe
from isophase.specs import model_spec
from isophase.statistics import straddling_phases
from isophase.targets import HuggingFaceTarget, load_part, open_target

Array = NDArray[np.float64]
Say = Callable[[str], None]

_AXIS_TOKENS = 8
"""Phase axis of a model without a stride, where nobody asks for another."""
_PROBES = ("records", "prefix", "in-sequence")
_CAUSES: tuple[CauseName, ...] = ("slot", "straddle", "anchor", "visibility")


def explain(
    model: str,
    *,
    probe: str = "records",
    items: int | None = None,
    stride_tokens: int | None = None,
    seed: int = 0,
    say: Say = lambda _: None,
) -> Explanation:
    """Find out where in a model its phase effect comes from.

    Args:
        model: folder of a model, `isophase:NAME`, or `hf:PATH_OR_ID`. Subfolders `step-N` that hold models
            are read as checkpoints of its training.
        probe: `records`, `prefix` or `in-sequence`.
        items: items; None: as the model proposes.
        stride_tokens: phase axis for a model without a compressor; None: 8.
        seed: of prompts, and of all resamples.
        say: told what is being measured.

    Returns:
        The findings; equal arguments give equal findings. The model is left as it was.

    Raises:
        IsophaseError: for a model that cannot be loaded or asked in this way.
    """
    if probe not in _PROBES:
        raise IsophaseError(f"--probe {probe!r} cannot be explained.", f"Give one of {', '.join(_PROBES)}.")
    folder, steps = _folder_and_steps(model)
    target = _open(model, folder)
    stride = target.grids[0].stride_tokens if target.grids else None
    if stride is not None and stride_tokens not in (None, stride):
        raise IsophaseError(
            f"--stride is {stride_tokens}, and the model compresses with stride {stride}.", "Leave --stride out."
        )
    axis = stride or stride_tokens or _AXIS_TOKENS
    settings = _probe_settings(target, folder, probe, items, axis, seed)
    built = build_probe(settings, target.tokenizer)
    questions = questions_of(built)
    network = target.model
    branches = [b for b in gate_branches(network) if b.stride_tokens == stride]

    say("knockouts")
    units = knockout.units_of(network)
    means, outcomes = knockout.mean_outputs(network, questions, units)
    before_IS, laps = outcomes.lap_means(axis), outcomes.laps_for(axis)
    knockouts = [
        _knocked_out(unit, before_IS, knockout.knock_out(network, questions, unit, means).lap_means(axis), laps, seed)
        for unit in units
    ]

    say("gates")
    profiles = _profiles(network, questions)
    training = [_step(step, path, target, questions) for step, path in steps]

    boundary = straddling_phases(stride, questions.span_tokens) if stride else []
    rolls = []
    for name, payloads in (("gates", False), ("gates and payloads", True)):
        chosen = [b for b in branches if b.payloads] if payloads else branches
        if cycling.slot_parameters(chosen, payloads=payloads):
            say(f"cycling of {name}")
            rolls.append((name, cycling.roll_all(network, questions, branches, axis, payloads=payloads)))

    say("causes")
    found = _causes(target, questions, settings, branches, axis, boundary, before_IS, laps, rolls, stride)
    draft = Explanation(
        isophase_version=__version__,
        model=target.name.removeprefix("hf:"),
        model_type=target.config.model_type,
        probe=probe,
        items=settings.items,
        prompts=len(built),
        records=settings.records,
        length_tokens=settings.length_tokens,
        seed=seed,
        stride_tokens=stride,
        window_tokens=max((b.window_tokens for b in branches), default=None),
        axis_tokens=axis,
        span_tokens=questions.span_tokens,
        boundary_phases=boundary,
        baseline=curve_of(before_IS, laps, seed),
        knockouts=knockouts,
        gates=profiles,
        training=training,
        cycling=[_cycled(name, table, boundary, laps, seed) for name, table in rolls],
        causes=found,
        summary=[],
        notes=_notes(target, units, branches, rolls),
    )
    return draft.model_copy(update={"summary": summary(draft)})


def _folder_and_steps(model: str) -> tuple[Path | None, list[tuple[int, Path]]]:
    """The folder of a local model, and its checkpoints in order."""
    read = model_spec(model)
    if read.kind != "hf":
        return None, []
    folder = Path(read.place).expanduser()
    steps = []
    for path in folder.glob("step-*"):
        number = re.fullmatch(r"step-(\d+)", path.name)
        if number and (path / "config.json").is_file():
            steps.append((int(number[1]), path))
    steps.sort()
    if steps and not (folder / "config.json").is_file():
        folder = steps[-1][1]
    return (folder if folder.is_dir() else None), steps


def _open(model: str, folder: Path | None) -> HuggingFaceTarget:
    target = open_target(f"hf:{folder}" if folder else model_spec(model).text)
    if not isinstance(target, HuggingFaceTarget):
        raise IsophaseError(
            f"{model} has no parts to look into.", "Give a model folder, isophase:NAME or hf:PATH_OR_ID."
        )
    return target


def _probe_settings(
    target: HuggingFaceTarget, folder: Path | None, probe: str, items: int | None, axis: int, seed: int
) -> ProbeSettings:
    """As an audit would choose them; a model that `isophase train` wrote says what it was trained for."""
    trained = _trained_probe(folder) if folder else {}
    asked = AuditSettings(
        targets=(target.name,),
        control="none",
        probes=(probe,),
        stride=axis,
        items=items or trained.get("items"),
        records=trained.get("records"),
        length_tokens=trained.get("length_tokens"),
        seed=seed,
    )
    return make_plan(asked, lambda _: target, pilot=True).parts[0].probe


def _trained_probe(folder: Path) -> dict[str, Any]:
    """Probe settings in the training record beside a model, or beside its checkpoints; empty without one."""
    for record in (folder / "training.json", folder.parent / "training.json"):
        if not record.is_file():
            continue
        try:
            probe = json.loads(record.read_text(encoding="utf-8")).get("probe", {})
        except (ValueError, AttributeError) as error:
            raise IsophaseError(f"{str(record)!r} is no training record: {error}.", "Repair or remove it.") from error
        if isinstance(probe, dict):
            return probe
    return {}


def _knocked_out(unit: knockout.Unit, before_IS: Array, after_IS: Array, laps: int, seed: int) -> Knockout:
    lost = knockout.lost_shares(before_IS, after_IS, seed=seed)
    known = [None if np.isnan(share) else float(share) for share in lost.share]
    bounds = list(zip(lost.low.tolist(), lost.high.tolist(), strict=True))
    return Knockout(
        kind=unit.kind,
        name=unit.name,
        layer=unit.heads.layer,
        head=unit.index,
        is_kv_head=unit.kind == "kv_head" or (unit.kind == "layer" and unit.heads.kv_heads == 1),
        after=curve_of(after_IS, laps, seed),
        lost_share_by_phase=known,
        lost_share_interval_by_phase=[
            None if share is None else pair for share, pair in zip(known, bounds, strict=True)
        ],
        selective=lost.selective,
        surely_selective=lost.surely_selective,
    )


def _profiles(network: Any, questions: Questions) -> list[GateProfile]:
    return [
        GateProfile(
            layer=use.branch.layer,
            branch=use.branch.name,
            kv_head=use.kv_head,
            weight_by_offset=list(use.profile),
            static_slots=use.static_slots,
            per_window_slots=use.per_window_slots,
        )
        for use in gates.watch_gates(network, questions)
    ]


def _step(step: int, path: Path, target: HuggingFaceTarget, questions: Questions) -> TrainingStep:
    network = load_part(AutoModelForCausalLM, str(path), "model", dtype=target.dtype)
    return TrainingStep(step=step, gates=_profiles(network.to(target.device).eval(), questions))


def _cycled(name: str, table: Rolls, boundary: Sequence[int], laps: int, seed: int) -> Cycling:
    original_IS = table.accuracy[table.shifts.index(0)]
    stride = original_IS.shape[1]
    shifts = cycling.shown_shifts(stride)
    observed_DIS = np.stack([table.accuracy[table.shifts.index(shift % stride)] for shift in shifts])
    shown = []
    for shift, observed_IS in zip(shifts, observed_DIS, strict=True):
        predicted = cycling.predict(original_IS.mean(axis=0), shift)
        kept = cycling.kept_phases(boundary, shift, stride, image=False)
        observed = observed_IS.mean(axis=0)
        shown.append(
            CyclingShift(
                delta_tokens=shift,
                predicted_by_phase=predicted.tolist(),
                observed=curve_of(observed_IS, laps, seed),
                r_squared=cycling.fit(predicted, observed).r_squared,
                r_squared_without_boundary=cycling.fit(predicted[kept], observed[kept]).r_squared,
            )
        )
    pooled = []
    for phases, left_out, image in (
        ("all", [], False),
        ("without boundary", boundary, False),
        ("without boundary and its image", boundary, True),
    ):
        fit, bounds = cycling.pooled(original_IS, observed_DIS, shifts, left_out, image=image, seed=seed)
        pooled.append(
            PooledFit(
                phases=phases,
                r_squared=fit.r_squared,
                r_squared_interval=bounds,
                correlation_squared=fit.correlation_squared,
            )
        )
    return Cycling(
        parameters="gates and payloads" if "payloads" in name else "gates",
        shifts=shown,
        pooled=pooled,
        rolls=list(table.shifts),
        complete=table.complete,
        moving=curve_of(table.moving(), laps, seed),
        staying=curve_of(table.staying(), laps, seed),
    )


def _causes(
    target: HuggingFaceTarget,
    questions: Questions,
    settings: ProbeSettings,
    branches: Sequence[GateBranch],
    axis: int,
    boundary: Sequence[int],
    before_IS: Array,
    laps: int,
    rolls: Sequence[tuple[str, Rolls]],
    stride: int | None,
) -> list[Cause]:
    if stride is None or not branches:
        why = (
            "The model has no fixed grid of chunks."
            if stride is None
            else "The model's compressor is of a kind whose parts are not known here."
        )
        nothing = not_applicable("none", why)
        return [Cause(cause=name, interventions=[nothing], conclusion=why) for name in _CAUSES]
    subject = causes.Subject(
        model=target.model,
        questions=questions,
        settings=settings,
        tokenizer=target.tokenizer,
        branches=branches,
        stride_tokens=axis,
        boundary=boundary,
        baseline=before_IS,
        laps=laps,
    )
    return [
        causes.slot_cause(subject, rolls),
        causes.straddle_cause(subject, rolls),
        causes.anchor_cause(subject),
        causes.visibility_cause(subject),
    ]


def _notes(
    target: HuggingFaceTarget,
    units: Sequence[knockout.Unit],
    branches: Sequence[GateBranch],
    rolls: Sequence[tuple[str, Rolls]],
) -> list[str]:
    notes = []
    if not units:
        notes.append("The attention modules of this model are not known here; no head was knocked out.")
    if any(unit.kind == "query_head" for unit in units):
        notes.append(
            "All query heads of a layer share one KV head, so knocking out a KV head is knocking out the layer; query "
            "heads are taken out one by one beside it."
        )
    if target.grids and target.grids[0].kind != "payload":
        notes.append("The compressor only selects exact tokens; its entries are not read.")
    if len(target.grids) > 1:
        others = ", ".join(str(grid.stride_tokens) for grid in target.grids[1:])
        notes.append(f"The model has other grids as well (stride {others}); interventions leave them alone.")
    if any(not table.complete for _, table in rolls):
        notes.append("The stride is long, so only some rolls were made; what moves and what stays separate roughly.")
    if branches and all(b.kind == "deepseek_v4" for b in branches):
        notes.append("Cycling rolls position_bias over the stride, in compressors and indexers alike.")
    if branches and not any(b.gates for b in branches):
        notes.append("No gate parameter belongs to an offset, so there is nothing to cycle.")
    return notes
