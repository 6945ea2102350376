"""From what the user asked to the exact list of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from pydantic import ValidationError

from isophase import __version__
from isophase.audit.settings import AuditSettings, Part, Plan, Role, StrideSource
from isophase.errors import IsophaseError
from isophase.probes import Probe, ProbeSettings, Tokenizer, build_probe
from isophase.specs import base_of
from isophase.statistics import DEFAULT_PERIODS, detectable_amplitude, fits
from isophase.targets import REPEAT_EVERY, RemoteTarget, Target

# Whole laps of 2, 3, 4, 6, 8 and 12; the controls 5 and 7 use most of it.
_WINDOW_TOKENS = 24
_WIDER_WINDOW_TOKENS = 48
_LENGTH_TOKENS = 512
_ITEMS = 64
_RECORDS_WITHOUT_PILOT = 16

# Near the ceiling and near zero a binary score carries no information; near the ceiling, though, few prompts
# exclude an effect. The hardest task that is answered this often serves both.
_PILOT_AIM = 0.9
_PILOT_RECORDS = (128, 64, 32, 16, 8, 4, 2)
# One prompt an item: an item is mostly answered alike at all its positions.
_PILOT_ITEMS, _PILOT_COLUMNS = 24, (0,)

_OPTIONS = {
    "length_tokens": "--length",
    "window_tokens": "--window",
    "key_tokens": "--key-tokens",
    "value_tokens": "--value-tokens",
}

OpenTarget = Callable[[str], Target]


def make_plan(settings: AuditSettings, open_target: OpenTarget, *, pilot: bool) -> Plan:
    """Settle everything that decides the prompts.

    Args:
        settings: what the user asked for.
        open_target: opens a target by its spec.
        pilot: whether the targets may be asked a few questions, to choose the number of records
            where nobody said it. Without, 16.

    Returns:
        The plan; the same for the same settings and models.

    Raises:
        IsophaseError: for settings that cannot work, with the remedy.
    """
    check_settings(settings)
    targets = [("target", spec) for spec in settings.targets]
    control = settings.control
    if control is None and settings.targets:
        control = open_target(settings.targets[0]).defaults.control
    if control not in (None, "none", *settings.targets):
        assert control is not None
        targets.append(("control", control))
    parts: list[Part] = []
    notes: list[str] = []
    first_row = 0
    lead = open_target(settings.targets[0])
    for probe_name in settings.probes:
        records, pilot_accuracy = _records(settings, probe_name, lead, pilot)
        for role, spec in targets:
            target = open_target(spec)
            # All models of a run answer the same items, so that they can be compared in pairs.
            # A control without a grid is held to the stride of the model that it stands beside.
            stride, source = _stride(settings, target if role == "target" or target.grids else lead)
            proposal = _probe_settings(settings, probe_name, lead, records)
            try:
                probe = build_probe(proposal, target.tokenizer)
                _check_length(probe, target)
                _check_window(probe, stride, spec)
            except IsophaseError as error:
                if len(settings.probes) == 1:
                    raise
                notes.append(f"{probe_name} on {spec} was left out: {error}")
                continue
            grids = tuple(
                f"{g.setting}: stride {g.stride_tokens} ({g.kind} compressed)"
                if g.kind == "payload"
                else f"{g.setting}: stride {g.stride_tokens} (selector only, exact tokens are still read)"
                for g in target.grids
            )
            remote = target if isinstance(target, RemoteTarget) else None
            parts.append(
                Part(
                    role=_role(role),
                    target=spec,
                    probe=proposal,
                    stride_tokens=stride,
                    stride_source=source,
                    grids=grids,
                    first_row=first_row,
                    rows=len(probe),
                    fingerprint=target.fingerprint(),
                    pilot_accuracy=pilot_accuracy,
                    tokenizer=remote.tokenizer_source if remote else "",
                    control_periods=remote.control_periods if remote else (),
                )
            )
            first_row += len(probe)
    notes += _untested_controls(parts)
    if not parts:
        raise IsophaseError("no probe applies to these models: " + "; ".join(notes), "Choose other probes.")
    return Plan(isophase_version=__version__, settings=settings, parts=tuple(parts), notes=tuple(notes))


def _untested_controls(parts: Sequence[Part]) -> list[str]:
    """A period of the server that the window is too short for must not look as if it had been excluded."""
    return [
        f"The block size of {part.target}, {block} tokens, does not fit the window of "
        f"{part.probe.window_tokens} positions and was not tested: --window {block}."
        for part in parts
        for block in part.control_periods
        if part.probe.probe != "completion" and not fits(block, part.probe.window_tokens)
    ]


def _role(role: str) -> Role:
    return "control" if role == "control" else "target"


def check_settings(settings: AuditSettings) -> None:
    """Refuse numbers that cannot work, before any model is loaded.

    Raises:
        IsophaseError: naming the option, its value and the limit.
    """
    lowest = {"items": 2, "records": 2, "length_tokens": 8, "window_tokens": 2}
    for name, limit in lowest.items():
        value = getattr(settings, name)
        if value is not None and value < limit:
            option = _OPTIONS.get(name, "--" + name)
            raise IsophaseError(f"{option} is {value}; it must be at least {limit}.", f"Give {option} {limit} or more.")
    if isinstance(settings.stride, int) and settings.stride < 2:
        raise IsophaseError(f"--stride is {settings.stride}; it must be at least 2.", "Give auto, scan or 2 and up.")
    if not 0 < settings.margin < 0.5:
        raise IsophaseError(f"--margin is {settings.margin}; it must lie between 0 and 0.5.", "The usual one is 0.02.")
    if settings.seed < 0:
        raise IsophaseError(f"--seed is {settings.seed}; it must not be negative.", "Give 0 or more.")
    window = settings.window_tokens
    if window is not None and isinstance(settings.stride, int) and settings.stride > window:
        raise IsophaseError(
            f"--stride {settings.stride} is larger than the window of {window} positions: "
            "not every phase would be asked.",
            f"Give --window {settings.stride} or more.",
        )


def _stride(settings: AuditSettings, target: Target) -> tuple[int | None, StrideSource]:
    if isinstance(settings.stride, int):
        return settings.stride, "given"
    if settings.stride == "auto" and target.grids:
        return target.grids[0].stride_tokens, "configuration"
    return None, "scan"


def _window(settings: AuditSettings, lead: Target) -> int:
    if settings.window_tokens is not None:
        return settings.window_tokens
    stride, _ = _stride(settings, lead)
    if stride is not None:
        return stride * math.ceil(_WINDOW_TOKENS / stride)
    # Whole laps of a server's blocks too, where that does not multiply the prompts.
    fitting = [_WINDOW_TOKENS, _WIDER_WINDOW_TOKENS]
    blocks = lead.control_periods if isinstance(lead, RemoteTarget) else ()
    return next((w for w in fitting if all(w % block == 0 for block in blocks)), _WINDOW_TOKENS)


def _probe_settings(settings: AuditSettings, probe_name: str, lead: Target, records: int) -> ProbeSettings:
    defaults = lead.defaults
    items = settings.items or defaults.items or _ITEMS
    length = settings.length_tokens or defaults.length_tokens or _LENGTH_TOKENS
    style = settings.style if settings.style != "auto" else (defaults.style or "auto")
    # A default gives way to few records; what the user asked for does not.
    usual = min(defaults.demonstrations, records - 1)
    demonstrations = usual if settings.demonstrations is None else settings.demonstrations
    try:
        return ProbeSettings.model_validate(
            {
                "probe": probe_name,
                "items": items,
                "records": records,
                "length_tokens": length,
                "window_tokens": _window(settings, lead),
                "seed": settings.seed,
                "demonstrations": demonstrations,
                "key_tokens": settings.key_tokens,
                "value_tokens": settings.value_tokens,
                "style": style,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise IsophaseError(
            f"{_OPTIONS.get(name, '--' + name)} is {first['input']!r}: {first['msg'].lower()}.",
            "See `isophase audit --help`.",
        ) from error


def _check_length(probe: Probe, target: Target) -> None:
    first = probe.prompt(0)
    length = len(first.ids) + len(first.answer_ids) - 1
    limit = target.max_length_tokens
    if limit is not None and length > limit:
        raise IsophaseError(
            f"prompts of {length} tokens exceed the {limit} that {target.name} can read.",
            f"Give --length {limit - len(first.answer_ids) + 1} or less.",
        )


def _check_window(probe: Probe, stride: int | None, spec: str) -> None:
    if stride is not None and stride > probe.window_tokens:
        remedy = "Audit it with --probe records." if probe.name == "completion" else f"Give --window {stride} or more."
        raise IsophaseError(
            f"the stride of {spec} is {stride} tokens, larger than the {probe.name} probe's window of "
            f"{probe.window_tokens} positions: not every phase would be asked.",
            remedy,
        )


def needs_pilot(settings: AuditSettings, open_target: OpenTarget) -> bool:
    """Whether an audit would ask a few questions first, to choose the number of records."""
    known = settings.records or open_target(settings.targets[0]).defaults.records
    return known is None and settings.probes != ("completion",)


def _records(settings: AuditSettings, probe_name: str, lead: Target, pilot: bool) -> tuple[int, dict[str, float]]:
    """The number of records: as asked, as the target proposes, or as a pilot finds it."""
    known = settings.records or lead.defaults.records
    if known is not None or probe_name == "completion":
        return known or _RECORDS_WITHOUT_PILOT, {}
    if not pilot:
        return _RECORDS_WITHOUT_PILOT, {}
    accuracy: dict[str, float] = {}
    chosen = None
    for records in _PILOT_RECORDS:
        proposal = _probe_settings(settings, probe_name, lead, records)
        try:
            probe = build_probe(proposal.model_copy(update={"items": _PILOT_ITEMS}), lead.tokenizer)
            _check_length(probe, lead)
        except IsophaseError:
            if records == _PILOT_RECORDS[-1] and not accuracy:
                raise
            continue
        accuracy[str(records)] = measured = _pilot_accuracy(probe, lead)
        chosen = records
        if measured >= _PILOT_AIM:
            break
    assert chosen is not None
    # Nothing reached the aim: take what came nearest rather than the last tried; of equals, the fewest.
    if accuracy[str(chosen)] < _PILOT_AIM:
        chosen = min(map(int, accuracy), key=lambda count: (-accuracy[str(count)], count))
    return chosen, accuracy


def _pilot_accuracy(probe: Probe, target: Target) -> float:
    columns = [c % probe.window_tokens for c in _PILOT_COLUMNS]
    prompts = [probe.prompt(item * probe.window_tokens + c) for item in range(_PILOT_ITEMS) for c in columns]
    judged = [answer.correct for answer in target.answer(prompts) if answer.status in ("ok", "wrong_format")]
    return float(np.mean(judged)) if judged else 0.0


def batches(part: Part, width: int, grouped: bool) -> list[list[int]]:
    """Rows of a part in the order in which they are asked, in batches that are asked together.

    The order depends on the seed alone. A target that shares an item's prefix gets items in random
    order, and the columns of each in random order; any other gets single rows in random order.
    A batch is the unit of resumption: a batch that was cut off is asked again as a whole, so every
    answer comes out of the same batch as in an undisturbed run, to the last digit. Variants of one model
    have one order, so that they can share the reading of a batch.
    """
    model = base_of(part.target)
    seed = int.from_bytes(sha256(f"{part.probe.seed} {part.probe.probe} {model}".encode()).digest()[:8])
    rng = np.random.default_rng(seed)
    rows = np.arange(part.first_row, part.first_row + part.rows)
    if not grouped:
        return [[int(row)] for row in rng.permutation(rows)]
    items = rows.reshape(-1, width)
    return [[int(row) for row in rng.permutation(items[i])] for i in rng.permutation(len(items))]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a plan can show, before anything is asked.

    Attributes:
        prompts: prompts of this part.
        items: items of this part.
        window_tokens: positions per item.
        length_tokens: tokens of the longest prompt.
        tokens: tokens that the model would read without sharing prefixes.
        residues: residues covered of each period that can be tested, `{period: positions per item}`.
        detectable_amplitude: amplitude found with 90 % power at an accuracy of 80 %.
    """

    prompts: int
    items: int
    window_tokens: int
    length_tokens: int
    tokens: int
    residues: dict[int, int]
    detectable_amplitude: float


def costs(plan: Plan, open_target: OpenTarget) -> list[str]:
    """What a run will ask of servers, in sentences; none for models in this process, which cost nothing."""
    lines = []
    for part in plan.parts:
        target = open_target(part.target)
        if isinstance(target, RemoteTarget):
            view = outlook(part, target.tokenizer)
            times = f", each at {target.readings} shifts" if target.readings > 1 else ""
            lines.append(
                f"{part.target}: {view.prompts:,} prompts of up to {view.length_tokens:,} tokens{times}, "
                f"{view.tokens * target.readings:,} tokens to read; "
                f"about one prompt in {REPEAT_EVERY} is asked twice."
            )
    return lines


def outlook(part: Part, tokenizer: Tokenizer) -> Outlook:
    """Coverage, cost and power of one part of a plan."""
    probe = build_probe(part.probe, tokenizer)
    window = probe.window_tokens
    # Within an item, lengths are the same or grow evenly from the first column to the last.
    first, last = len(probe.prompt(0).ids), len(probe.prompt(window - 1).ids)
    periods: Sequence[int] = (
        [part.stride_tokens] if part.stride_tokens else [p for p in DEFAULT_PERIODS if fits(p, window)]
    )
    tests = 3 if part.stride_tokens else len(periods)
    return Outlook(
        prompts=part.rows,
        items=probe.items,
        window_tokens=window,
        length_tokens=last,
        tokens=part.rows * (first + last) // 2,
        residues={period: window // period * period for period in periods},
        detectable_amplitude=detectable_amplitude(part.rows, 0.16, 0.9, tests=tests, window_tokens=window),
    )
