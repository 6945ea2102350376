"""Slot, straddle, anchor, visibility: each cause taken away by an intervention, and the gap measured again.

Legend: I items, P positions, N prompts, S phases, E entries, B prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isophase.errors import IsophaseError
from isophase.lab.explain.anatomy import GateBranch, average, changed, hooked
from isophase.lab.explain.curves import SMALLEST_GAP_POINTS, curve_of, intervention, not_applicable
from isophase.lab.explain.cycling import Rolls, rolls_of, slot_parameters
from isophase.lab.explain.outcomes import Questions, ask, questions_of
from isophase.lab.explain.schema import Cause, CauseName, Intervention
from isophase.models import Rotary
from isophase.probes import ProbeSettings, RecordsProbe, Tokenizer, build_probe

Array = NDArray[np.float64]
_FILLER_STREAM = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What all interventions are about.

    Attributes:
        model: changed only for the length of a measurement.
        questions: all prompts.
        settings: of the probe that made them.
        tokenizer: of the model.
        branches: gates of the compressors with stride S.
        stride_tokens: S; the axis of phases.
        boundary: phases at which the record straddles a chunk edge.
        baseline: [I, S], accuracy by item and phase, model as it is.
        laps: outcomes behind each of these.
    """

    model: Any
    questions: Questions
    settings: ProbeSettings
    tokenizer: Tokenizer
    branches: Sequence[GateBranch]
    stride_tokens: int
    boundary: Sequence[int]
    baseline: Array
    laps: int

    def compare(self, name: str, after_IS: Array, before_IS: Array | None = None) -> Intervention:
        """The gap before and after."""
        before = self.baseline if before_IS is None else before_IS
        return intervention(name, before, after_IS, self.laps, {}, self.settings.seed)

    def table(self) -> Array:
        """Ask again, whatever is changed in the model right now. [I, S]."""
        return ask(self.model, self.questions).lap_means(self.stride_tokens)


def slot_cause(subject: Subject, rolls: Sequence[tuple[str, Rolls]]) -> Cause:
    """Slot: let every offset's parameters serve every phase; or give all offsets the same parameters.

    Args:
        subject: what is asked.
        rolls: name of the rolled parameters, and accuracy under every roll.
    """
    done: list[Intervention] = []
    shares: list[str] = []
    choices = [("gates", False)] + [("gates and payloads", True)] * any(b.payloads for b in subject.branches)
    for name, payloads in choices:
        parameters = slot_parameters(subject.branches, payloads=payloads)
        if parameters:
            with changed(parameters, average(subject.stride_tokens)):
                done.append(subject.compare(f"{name} of all offsets replaced by their mean", subject.table()))
    if not done:
        why = "No parameter belongs to an offset: there is no slot effect."
        return Cause(cause="slot", interventions=[not_applicable("none", why)], conclusion=why)
    shares.append(_equal_words(done[-1], choices[-1][0]))
    gates = slot_parameters(subject.branches, payloads=False)
    if any(b.kind == "compressed_qwen3" and b.gates for b in subject.branches):
        with changed(gates, torch.zeros_like):
            done.append(subject.compare("gates uniform over offsets", subject.table()))
    for name, table in rolls:
        done.append(subject.compare(f"every roll of {name}, averaged", table.staying()))
        moving = curve_of(table.moving(), subject.laps, subject.settings.seed)
        shares.append(
            f"with {name} rolled, {moving.gap_points:.0f} points ({_words(moving.gap_interval_points)}) of weakness "
            f"move with the parameters and {_gap_words(done[-1])} stay with the phase"
        )
    image = _image_words(subject, rolls)
    text = "; ".join([*shares, image] if image else shares)
    return Cause(cause="slot", interventions=done, conclusion=text[:1].upper() + text[1:] + ".")


def straddle_cause(subject: Subject, rolls: Sequence[tuple[str, Rolls]]) -> Cause:
    """Straddle: a filler token in front of records that are cut, so that none is; everything else equal.

    In all probes one token of filler moves from behind the record to before it with every column, so the
    prompt with the filler inserted is already asked: the same item, up to its next uncut phase, phase 0.
    """
    boundary, S = list(subject.boundary), subject.stride_tokens
    name = "filler in front of records that straddle a chunk edge, until they do not"
    if not 0 < len(boundary) < S:
        why = "No phase straddles." if not boundary else f"A record is longer than the stride {S}: it always straddles."
        return Cause(cause="straddle", interventions=[not_applicable(name, why)], conclusion=why)
    after = subject.baseline.copy()
    after[:, boundary] = after[:, [0]]
    done = [subject.compare(name, after)]
    parts = [f"records across a chunk edge score {_contrast(subject.baseline, boundary)} against the others"]
    for words, table in rolls:
        staying = table.staying()
        parts.append(
            f"{_contrast(staying, boundary)} averaged over all rolls of {words}, which "
            "give all phases the same parameters"
        )
        moved = staying.copy()
        moved[:, boundary] = moved[:, [0]]
        done.append(subject.compare(f"the same, averaged over all rolls of {words}", moved, staying))
    text = "; ".join(parts)
    return Cause(cause="straddle", interventions=done, conclusion=text[:1].upper() + text[1:] + ".")


def anchor_cause(subject: Subject) -> Cause:
    """Anchor: the entries that hold the record are rotated at the record's own position; or all are shifted."""
    name = "entries that hold the record anchored at the record's own position"
    config = subject.model.config.get_text_config()
    if getattr(config, "rotary_dims", None) == 0:
        why = "The model has no rotary embedding, so entries have no anchor."
        return Cause(cause="anchor", interventions=[not_applicable(name, why)], conclusion=why)
    S = subject.stride_tokens
    done = []
    for words, anchors_NE in (
        (name, own_anchors(subject)),
        (f"all anchors shifted by {S // 2} tokens", default_anchors(subject) + S // 2),
    ):
        done.append(subject.compare(words, _ask_anchored(subject, anchors_NE)))
    return Cause(cause="anchor", interventions=done, conclusion=_conclude("anchor", done[0]))


def default_anchors(subject: Subject) -> torch.Tensor:
    """Anchors as the model sets them, [N, E]."""
    questions = subject.questions
    entries = questions.ids.shape[1] // subject.stride_tokens
    return (torch.arange(entries) * subject.stride_tokens).repeat(len(questions.ids), 1)


def own_anchors(subject: Subject) -> torch.Tensor:
    """The same, but entries that hold a token of the record are anchored at the first one they hold."""
    anchors_NE = default_anchors(subject)
    S, W = subject.stride_tokens, max(b.window_tokens for b in subject.branches)
    first_N1 = torch.from_numpy(subject.questions.positions.reshape(-1, 1))
    last_N1 = first_N1 + subject.questions.span_tokens - 1
    end_E = torch.arange(anchors_NE.shape[1]) * S + S - 1
    start_E = end_E - W + 1
    holds_NE = (first_N1 <= end_E) & (last_N1 >= start_E)
    return torch.where(holds_NE, torch.maximum(first_N1, start_E), anchors_NE)


def _ask_anchored(subject: Subject, anchors_NE: torch.Tensor) -> Array:
    batch: list[torch.Tensor] = []

    def now(rows: slice) -> None:
        batch[:] = [anchors_NE[rows].to(subject.model.device)]

    with hooked(_anchor_hooks(subject, batch)):
        outcomes = ask(subject.model, subject.questions, before_batch=now)
    return outcomes.lap_means(subject.stride_tokens)


def _anchor_hooks(subject: Subject, batch: list[torch.Tensor]) -> list[Any]:
    """Hooks that rotate entries at the anchors in `batch`, which holds those of the current prompts [B, E]."""

    def own(_attention: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = named.get("hidden_BTD", arguments[0] if arguments else None)
        rotary: Rotary = subject.model.model.rotary_emb.angles(hidden, batch[0])
        return arguments, {**named, "entry_rotary": rotary}

    def deepseek(_rotary: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**named, "position_ids": batch[0]}

    hooks: list[Any] = []
    gated = {id(b.module) for b in subject.branches}
    for module in subject.model.modules():
        compressor = getattr(module, "compressor", None)
        if compressor is None:
            continue
        if hasattr(compressor, "grid"):
            hooks.append(partial(module.register_forward_pre_hook, own, with_kwargs=True))
        elif id(compressor) in gated:
            hooks.append(partial(compressor.rotary_emb.register_forward_pre_hook, deepseek, with_kwargs=True))
    return hooks


def visibility_cause(subject: Subject) -> Cause:
    """Visibility: the question moves by 0..S-1 tokens while the record stays where it is.

    Filler goes between the last record and the question. The prompts are S - 1 tokens shorter to begin with
    where the records still fit, so that no prompt is longer than usual.
    """
    S = subject.stride_tokens
    name = "every query phase, averaged"
    questions, question_tokens, probe = _movable(subject)
    rng = np.random.default_rng([subject.settings.seed, _FILLER_STREAM])
    filler_IK = np.stack([probe.style.filler(rng, S - 1) for _ in range(probe.items)]).astype(np.int64)
    place = probe.settings.length_tokens - question_tokens
    tables = {}
    for moved in rolls_of(S):
        longer = questions.with_tokens(place, filler_IK[:, :moved])
        query_phase = (probe.settings.length_tokens - 1 + moved) % S
        tables[query_phase] = ask(subject.model, longer).lap_means(S)
    usual = (subject.settings.length_tokens - 1) % S
    before = tables.get(usual, next(iter(tables.values())))
    done = subject.compare(name, np.mean(list(tables.values()), axis=0), before)
    by_query_IQ = np.stack([tables[phase].mean(axis=1) for phase in sorted(tables)], axis=1)
    by_query = curve_of(by_query_IQ, subject.laps * S, subject.settings.seed)
    gaps = [curve_of(table, subject.laps, subject.settings.seed).gap_points for table in tables.values()]
    text = (
        f"At single query phases the gap is {max(min(gaps), 0):.0f} to {max(gaps):.0f} points, averaged over them "
        f"{_gap_words(done)}; the query's own phase makes {max(by_query.gap_points, 0):.0f} points "
        f"({_words(by_query.gap_interval_points)}) of difference, all phases of the record together."
    )
    return Cause(cause="visibility", interventions=[done], conclusion=text)


def _movable(subject: Subject) -> tuple[Questions, int, RecordsProbe]:
    """Prompts with room for the question to move; their question's length; their probe."""
    settings = subject.settings
    shorter = settings.model_copy(update={"length_tokens": settings.length_tokens - subject.stride_tokens + 1})
    try:
        probe = build_probe(shorter, subject.tokenizer)
    except IsophaseError:
        probe = build_probe(settings, subject.tokenizer)
    assert isinstance(probe, RecordsProbe)
    style = probe.style
    question_tokens = len(style.opening) + settings.demonstrations * len(style.shot.ids) + len(style.question.ids)
    return questions_of(probe), question_tokens, probe


def _image_words(subject: Subject, rolls: Sequence[tuple[str, Rolls]]) -> str:
    """Where what moves is the boundary's image: with W = S nothing trains both sides of an edge together."""
    if any(b.window_tokens != b.stride_tokens for b in subject.branches):
        return ""
    weakest = {int(table.moving().mean(axis=0).argmin()) for _, table in rolls}
    if not weakest or not weakest <= set(subject.boundary):
        return ""
    return (
        "what moves is the image of the boundary: parameters from the two sides of an edge, which training only ever "
        "showed cut records, meet within one window"
    )


def _equal_words(done: Intervention, name: str) -> str:
    """What it means that all offsets share the mean of their parameters."""
    assert done.after is not None
    gap = f"{done.after.gap_points:.0f} points"
    return {
        "removes": f"with equal {name} at all offsets most of the gap is gone: the parameters by offset make it",
        "reduces": f"with equal {name} at all offsets the gap falls to {gap}: parameters by offset make a part of it",
        "no change": f"with equal {name} at all offsets the gap stays: parameters by offset are not what makes it",
        "enlarges": f"with equal {name} at all offsets the gap is {gap}: parameters by offset are not what makes it",
        "cannot tell": f"equal {name} at all offsets break the model, so they cannot tell",
    }.get(done.effect, "there is no gap to explain")


def _conclude(cause: CauseName, done: Intervention) -> str:
    sentences = {
        "removes": f"Taking the {cause} away removes most of the gap.",
        "reduces": f"Taking the {cause} away removes a part of the gap.",
        "no change": f"Taking the {cause} away changes nothing that can be told from chance.",
        "enlarges": f"Taking the {cause} away makes the gap larger.",
        "nothing to remove": "There is no gap to explain.",
        "cannot tell": f"Taking the {cause} away breaks the model; this cannot tell.",
        "not applicable": done.meaning,
    }
    return sentences[done.effect]


def _contrast(table_IS: Array, boundary: list[int]) -> str:
    others = np.setdiff1d(np.arange(table_IS.shape[1]), boundary)
    items = 100 * (table_IS[:, boundary].mean(axis=1) - table_IS[:, others].mean(axis=1))
    half = 1.96 * items.std(ddof=1) / np.sqrt(len(items))
    return f"{items.mean():+.0f} points ({_words((items.mean() - half, items.mean() + half))})".replace("-", "\u2212")


def _words(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.0f} to {interval[1]:.0f}".replace("-", "\u2212")


def _gap_words(done: Intervention) -> str:
    assert done.after is not None
    if done.after.gap_points < SMALLEST_GAP_POINTS:
        return "nothing to speak of"
    return f"{done.after.gap_points:.0f} ({_words(done.after.gap_interval_points)})"
