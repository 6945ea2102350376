"""What a vote gains, against what it costs: one drawing for each model that was audited with several votes."""

from __future__ import annotations

from itertools import groupby

from isophase.audit.report import words
from isophase.audit.report.figures import Figure
from isophase.audit.report.svg import Plot
from isophase.audit.schema import Finding

_DOT_PX = 4.0


def vote_figures(findings: list[Finding]) -> list[Figure]:
    """A figure for every model and probe that took part with different numbers of reads.

    Args:
        findings: of the targets of a run.
    """

    def model_and_probe(finding: Finding) -> tuple[str, str]:
        return finding.target.partition("|vote(")[0], finding.probe

    # Columns: votes over so many shifts by their cost, then votes over shifts that somebody chose.
    known = [f for f in findings if any(words.finite(value) is not None for value in f.accuracy_by_phase)]
    ordered = sorted(known, key=lambda f: (*model_and_probe(f), _chosen(f), f.reads, f.target))
    groups = [(name, list(group)) for name, group in groupby(ordered, key=model_and_probe)]
    return [_figure(*name, group) for name, group in groups if len({finding.reads for finding in group}) > 1]


def _figure(model: str, probe: str, findings: list[Finding]) -> Figure:
    """Mean, and worst phase with its interval, by number of reads."""
    places = [(index + 0.5) / len(findings) for index in range(len(findings))]
    plot = Plot(
        "Accuracy by how often a prompt is read: "
        + "; ".join(
            f"{_cost(f)} mean {words.number(f.accuracy)}, worst phase {words.number(_worst(f)[0])}" for f in findings
        )
        + ".",
        height_px=260,
        bottom_px=62,
    )
    plot.value_axis([0, 0.25, 0.5, 0.75, 1], "accuracy", 2)
    plot.curve([(x, f.accuracy) for x, f in zip(places, findings, strict=True) if not _chosen(f)], "line control")
    for x, finding in zip(places, findings, strict=True):
        worst, phase = _worst(finding)
        name = f"{finding.target}: mean {words.number(finding.accuracy)}, worst phase {words.number(worst)}"
        plot.line(x, x, *finding.interval_by_phase[phase], "whisker")
        plot.dot(x, worst, _DOT_PX, "point weak" if finding.verdict == "sensitive" else "point", name)
        plot.dot(x, finding.accuracy, _DOT_PX, "control", name)
        plot.text(x, plot.base_px + 16, _cost(finding))
        plot.text(x, plot.base_px + 32, _chosen(finding))
    plot.text(0.5, plot.base_px + 54, "times that a prompt is read for one answer", "axis")
    return Figure(
        key="votes",
        title=f"What a vote gains: {model}" + (f", {probe} probe" if probe != "records" else ""),
        svg=plot.markup(),
        legend=(("line control", "mean over phases"), ("point", "worst phase, 95 % interval")),
        reading=(
            "Each column is the same model, asked once or at several shifts of neutral tokens. Where both marks stand "
            "at the top, no phase is weak any more. Under a column, what it costs in tokens; shifts that somebody "
            "chose are named below. Shifts by whole chunks are a control: they move no fact to another phase, so they "
            "must gain nothing."
        ),
    )


def _worst(finding: Finding) -> tuple[float, int]:
    """Lowest accuracy and its phase; of equal ones the first."""
    known = [(value, phase) for phase, value in enumerate(finding.accuracy_by_phase) if words.finite(value) is not None]
    return min((value, phase) for value, phase in known if value is not None)


def _chosen(finding: Finding) -> str:
    """Shifts that were given one by one; empty where only their number was."""
    shifts = finding.target.partition("|vote(")[2].partition(",")[0].removesuffix(")")
    return shifts.replace(":", ", ") if ":" in shifts else ""


def _cost(finding: Finding) -> str:
    return "once" if finding.reads == 1 else f"{finding.reads} times"
