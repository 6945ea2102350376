"""What the numbers mean, in sentences. The terminal and the HTML report show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from isophase.audit.schema import Finding
from isophase.audit.settings import Part, Plan
from isophase.statistics import Assessment

_REASONS = {
    "harmonic_significant": "accuracy follows the period (harmonic 1, adjusted p = {harmonic:.2g})",
    "omnibus_significant": "accuracy differs between phases (Cochran's Q, adjusted p = {omnibus:.2g})",
    "boundary_significant": ("records that straddle a chunk edge differ from the others (adjusted p = {boundary:.2g})"),
    "scan_significant": "the scan over periods finds one (family-wise p = {scan:.2g})",
    "upper_limit_below_margin": ("an amplitude of the margin or more is excluded (95 % upper limit {upper:.3f})"),
    "nothing_significant": "no test is significant after adjustment",
    "upper_limit_above_margin": ("but an amplitude above the margin is not excluded (95 % upper limit {upper:.3f})"),
    "effect_below_margin": "an effect is significant, but smaller than the margin",
    "too_few_items": "fewer than two items have an answer at every position",
    "window_shorter_than_stride": "the window is shorter than the stride, so not every phase was asked",
    "no_period_testable": "no period fits into the window",
    "accuracy_zero": ("the model answered nothing right, so there is no accuracy that could depend on the phase"),
    "items_dropped": "{dropped} items were left out because an answer is missing",
    "near_ceiling": "accuracy is near its ceiling, where a binary score carries little information",
    "periods_untestable": (
        "periods {untestable} do not fit the window of {window} positions and were not tested (--window)"
    ),
    "shorter_period_explains": (
        "the scan, told nothing, names {scan_period} tokens: a shorter period explains the stride's effect"
    ),
    "other_period_found": "the scan names another period, {scan_period} tokens",
    "control_period_found": ("an odd control period is significant: look for a confound before blaming compression"),
}
_OBSTACLES = {"too_few_items", "accuracy_zero", "window_shorter_than_stride", "no_period_testable"}


def reasons(part: Part, result: Assessment) -> list[str]:
    """The assessment's reasons as sentences without a full stop."""
    adjusted = result.p_values_adjusted
    numbers = {
        "harmonic": adjusted.get("harmonic", float("nan")),
        "omnibus": adjusted.get("omnibus", float("nan")),
        "boundary": adjusted.get("boundary", float("nan")),
        "scan": adjusted.get("scan", float("nan")),
        "upper": result.deciding_upper,
        "dropped": result.dropped_items,
        "untestable": ", ".join(map(str, result.untestable_periods)),
        "window": part.probe.window_tokens,
        "scan_period": result.scan_period_tokens,
    }
    return [_REASONS[code].format(**numbers) for code in result.reasons]


def sentence(part: Part, result: Assessment) -> str:
    """The verdict in one sentence."""
    name, probe = part.target, part.probe.probe
    low, high = result.gap_interval_points
    if result.verdict == "sensitive":
        assert result.period_tokens is not None
        weak = ""
        if result.worst_phase is not None:
            accuracy = result.accuracy_by_phase[result.worst_phase]
            assert accuracy is not None
            at_edge = " (the chunk boundary)" if result.worst_phase in result.boundary_phases else ""
            weak = f", weakest at phase {result.worst_phase}{at_edge} with {accuracy:.0%} right"
        return (
            f"{name} is phase-sensitive on {probe}: accuracy repeats every {result.period_tokens} tokens, "
            f"best minus worst phase {result.gap_points:.1f} points (95 % {low:.1f} to {high:.1f}){weak}."
        )
    if result.verdict == "none":
        return (
            f"{name} shows no phase sensitivity above the margin on {probe}: accuracy {result.accuracy:.1%}, "
            f"amplitude at most {result.deciding_upper:.3f} (margin {result.margin:g}), "
            f"gap {result.gap_points:.1f} points (95 % {low:.1f} to {high:.1f})."
        )
    if result.reasons[0] in _OBSTACLES:
        # Nothing was tested: an amplitude and its limit would only look like a result.
        return f"{name} on {probe} is inconclusive: {reasons(part, result)[0]}."
    return (
        f"{name} on {probe} is inconclusive: accuracy {result.accuracy:.1%}, amplitude "
        f"{result.amplitude_debiased:.3f} "
        f"with an upper limit of {result.deciding_upper:.3f} (margin {result.margin:g})."
    )


def advice(part: Part, result: Assessment, *, has_control: bool) -> list[str]:
    """What to do next. `has_control`: whether a control model was asked the same items."""
    if result.verdict == "sensitive":
        most = (result.period_tokens or 2) - 1
        tokens = "1 neutral token" if most == 1 else f"1 to {most} neutral tokens"
        lines = [
            f"Do not trust one placement: ask again with {tokens} added before the facts, and compare the answers.",
        ]
        if result.weak_phases:
            phases = ", ".join(map(str, result.weak_phases))
            lines.append(f"Weak phases (position mod {result.axis_tokens}): {phases}. Move facts away from them.")
        if part.role == "target" and not has_control:
            lines.append("Audit with a full-attention control (--control) to see what compression alone costs.")
        return lines
    if part.probe.probe == "completion":
        # Its prompts are fixed: neither more nor easier ones can be had.
        return [
            "The completion probe has a fixed set of prompts; "
            "audit the same model with --probe records, which can ask as many as it takes."
        ]
    if result.verdict == "none":
        return ["Nothing to do for this probe, length and number of records. Longer prompts are another question."]
    if "accuracy_zero" in result.reasons:
        fewer = "fewer --records, " if part.probe.records > 2 else ""
        return [
            f"Make the task easier: {fewer}a shorter --length, or --demonstrations 1; "
            "or give a --style that suits the model."
        ]
    if result.more_prompts_to_decide:
        window = part.probe.window_tokens
        items = -(-(result.prompts + result.more_prompts_to_decide) // window)
        return [f"About {result.more_prompts_to_decide:,} more prompts would decide: --items {items}."]
    return ["More of the same would not decide; change the difficulty (--records, --length) instead."]


def limits(plan: Plan) -> list[str]:
    """What a reader of the whole run must know."""
    notes = []
    lead = plan.parts[0]
    lengths = sorted({part.probe.length_tokens for part in plan.parts if part.probe.probe != "completion"})
    if lengths:
        text = ", ".join(str(n) for n in lengths)
        notes.append(f"Prompts have {text} tokens; effects can be larger in longer contexts.")
    if lead.pilot_accuracy:
        tried = ", ".join(f"{count}: {accuracy:.0%}" for count, accuracy in lead.pilot_accuracy.items())
        notes.append(f"A pilot chose the number of records (accuracy by records: {tried}).")
    for part in plan.parts:
        if any("selector only" in grid for grid in part.grids):
            notes.append(
                f"{part.target} compresses only what selects tokens; it still reads exact tokens, "
                "so an effect there means wrong selection, not lost information."
            )
            break
    if any(part.probe.probe == "completion" for part in plan.parts):
        notes.append(
            "The completion probe has four filler families with fixed lengths, not random starts: "
            "read its strip as a demonstration; the records probe is the test."
        )
    return notes


def conditions(findings: Iterable[Finding], manifest: Mapping[str, Any]) -> list[str]:
    """What the targets say about the conditions under which they answered, each once.

    Args:
        findings: of the run.
        manifest: of the run; its parts may hold `notes`.
    """
    notes: dict[str, None] = {}
    for finding in findings:
        if finding.repeats:
            share = finding.flips / finding.repeats
            notes[
                f"{finding.target}: {finding.flips} of {finding.repeats} repeated {finding.probe} prompts were "
                f"answered otherwise the second time (flip rate {share:.1%}); no difference below that is the model's."
            ] = None
    for facts in manifest["parts"].values():
        notes |= dict.fromkeys(facts.get("notes", ()))
    return list(notes)
