"""What the HTML page and the terminal say alike: verdict words, numbers, who is compared with whom."""

from __future__ import annotations

import math
import unicodedata

from isophase.audit.schema import Finding, Interval, Report, Verdict

VERDICT_WORDS: dict[Verdict, str] = {
    "sensitive": "Sensitive",
    "none": "No sensitivity above the margin",
    "inconclusive": "Inconclusive",
}

P_VALUE_MEANINGS = {
    "harmonic": "accuracy rises and falls once per period",
    "omnibus": "accuracy differs between phases in any way",
    "boundary": "records that straddle a chunk edge differ from the others",
    "scan": "the strongest period of the scan, all periods counted",
}

STATUS_MEANINGS = {
    "ok": "answered and scored",
    "wrong_format": "answered, but not in the form that was asked for",
    "truncated": "cut off; not counted as a miss",
    "error": "no answer came back; not counted as a miss",
}

MISSING = "n/a"


def plain(text: str) -> str:
    """Make foreign text safe to show: control characters could steer a terminal or break XML."""
    return "".join(
        " " if character in "\t\n\r" else "\ufffd" if unicodedata.category(character) in {"Cc", "Cs"} else character
        for character in text
    )


def finite(value: float | None) -> float | None:
    """Return the value, or None where there is nothing that can be drawn or printed."""
    return value if value is not None and math.isfinite(value) else None


def number(value: float | None, digits: int = 2) -> str:
    """Write a number with a fixed count of digits after the point, so that columns line up."""
    known = finite(value)
    if known is None:
        return MISSING
    text = f"{known:.{digits}f}"
    # -0.001 rounds to "-0.00", which reads like a finding.
    return text.removeprefix("-") if float(text) == 0 else text


def count(value: int | None) -> str:
    """Write a whole number with a separator of thousands."""
    return MISSING if value is None else f"{value:,}"


def interval(bounds: Interval, digits: int = 2) -> str:
    """Write an interval with the word *to*: a dash would be read as a minus."""
    return f"{number(bounds[0], digits)} to {number(bounds[1], digits)}"


def p_value(value: float | None) -> str:
    """Write a p-value; below 0.001 the digits say nothing more."""
    known = finite(value)
    if known is None:
        return MISSING
    return "< 0.001" if known < 0.001 else f"{known:.3f}"


def phase_list(phases: list[int], limit: int = 12) -> str:
    """Write phases as runs, such as `3, 5-7`; at most `limit` runs."""
    runs: list[list[int]] = []
    for phase in sorted(phases):
        if runs and phase == runs[-1][1] + 1:
            runs[-1][1] = phase
        else:
            runs.append([phase, phase])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    hidden = len(words) - limit
    return ", ".join(words[:limit]) + (f" and {hidden} more" if hidden > 0 else "") if words else "none"


def period(finding: Finding) -> str:
    """Write the period that was found."""
    return "none found" if finding.period_tokens is None else f"{finding.period_tokens} tokens"


def stride(finding: Finding) -> str:
    """Say where the tested stride came from."""
    if finding.stride_tokens is None or finding.stride_source == "scan":
        return "stride unknown, scanned"
    source = "by the model's configuration" if finding.stride_source == "configuration" else "by the user"
    told = f"stride {finding.stride_tokens} given {source}"
    named = finding.scan_period_tokens
    return told if named is None or named == finding.period_tokens else f"{told}; the scan names {named}"


def sample(finding: Finding) -> str:
    """What the prompts were made of."""
    made_of = f"{finding.items:,} items, {finding.records:,} records, {finding.length_tokens:,} tokens long"
    return made_of + (f", {finding.dropped_items:,} items dropped" if finding.dropped_items else "")


def consistency(finding: Finding) -> str:
    """Say which items do not depend on their position; empty where a report does not know."""
    always, never = finding.items_always_right, finding.items_never_right
    if always is None or never is None:
        return ""
    return f"{always:,} right at every position, {never:,} at none, {finding.items - always - never:,} at some"


def at_phase(values: list[float | None], phase: int | None) -> float | None:
    """Look up a phase; None where the phase or its value is unknown."""
    return finite(values[phase]) if phase is not None and 0 <= phase < len(values) else None


def phase_accuracy(finding: Finding, phase: int | None) -> str:
    """Name a phase with its accuracy."""
    if phase is None:
        return MISSING
    accuracy = number(at_phase(finding.accuracy_by_phase, phase))
    return f"{phase} of {finding.axis_tokens}, accuracy {accuracy}"


def all_findings(report: Report) -> list[Finding]:
    """Every finding; a report that lists none still is one itself."""
    return list(report.findings) or [report]


def target_findings(report: Report) -> list[Finding]:
    """The findings that a reader came for; of a run with controls only, the controls."""
    return [f for f in all_findings(report) if f.role == "target"] or all_findings(report)


def control_of(report: Report, finding: Finding) -> Finding | None:
    """The same probe on the control model, if one took part."""
    if finding.role == "control":
        return None
    candidates = [f for f in report.findings if f.role == "control"]
    if report.control is not None:
        candidates.append(report.control)
    return next((f for f in candidates if f.probe == finding.probe), None)


def overall_verdict(report: Report) -> Verdict:
    """One verdict for the run: sensitive if any target is, else inconclusive if any target is."""
    verdicts = {finding.verdict for finding in target_findings(report)}
    if "sensitive" in verdicts:
        return "sensitive"
    return "inconclusive" if "inconclusive" in verdicts else "none"


def headline(report: Report) -> str:
    """The run in one sentence: the finding's own where there is one, else how many say what."""
    findings = target_findings(report)
    if len(findings) == 1:
        return findings[0].sentence
    parts = []
    for verdict, one, many in (
        ("sensitive", "is sensitive to the phase", "are sensitive to the phase"),
        ("inconclusive", "is inconclusive", "are inconclusive"),
        ("none", "shows no sensitivity above the margin", "show no sensitivity above the margin"),
    ):
        hits = sum(finding.verdict == verdict for finding in findings)
        if hits:
            parts.append(f"{hits} {one if hits == 1 else many}")
    return f"Of {len(findings)} tests, " + ", ".join(parts) + "."


def lead(finding: Finding) -> str:
    """The verdict's words before its sentence, unless the sentence opens with them."""
    title = VERDICT_WORDS[finding.verdict]
    return "" if finding.sentence.lower().startswith(title.lower()) else title + ". "
