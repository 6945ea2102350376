"""`print_report`: the report for a terminal, a log file or a pipe; colour adds nothing that words lack."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isophase.audit.report import words
from isophase.audit.report.fold import control_for
from isophase.audit.schema import Finding, Interval, Report, Verdict

MOST_PHASES = 16
WEAKEST, STRONGEST = 6, 3  # shown of a longer axis
STYLES: dict[Verdict, str] = {"sensitive": "bold red", "none": "bold green", "inconclusive": "bold yellow"}
SHORT: dict[Verdict, str] = {"sensitive": "sensitive", "none": "none", "inconclusive": "inconclusive"}


@dataclass(frozen=True)
class Marks:
    """The characters of a bar; terminals without Unicode get their own."""

    fill: str
    left: str
    right: str
    line: str
    point: str
    empty: str


UNICODE = Marks("█", "├", "┤", "─", "●", " ")
ASCII = Marks("#", "[", "]", "-", "o", " ")


def print_report(report: Report, console: Console) -> None:
    """Print the report within the console's width.

    Args:
        report: the findings of a run.
        console: where to print; its width and encoding decide the layout.
    """
    findings, targets = words.all_findings(report), words.target_findings(report)
    verdict = words.overall_verdict(report)
    console.print(_line((words.VERDICT_WORDS[verdict].upper(), STYLES[verdict])))
    _print(console, words.headline(report))
    if len(targets) > 1:
        console.print()
        console.print(_summary(findings, console))
    for finding in targets:
        console.print()
        _print_finding(report, finding, console, alone=len(targets) == 1)
    if report.notes:
        console.print()
        _print_list(console, "Limits of this run", report.notes)


def _line(*parts: str | tuple[str, str]) -> Text:
    """Text without markup: names may hold brackets. Long paths are folded, never cut."""
    safe = [words.plain(p) if isinstance(p, str) else (words.plain(p[0]), p[1]) for p in parts]
    return Text.assemble(*safe, overflow="fold")


def _print(console: Console, *parts: str | tuple[str, str], indent: int = 0) -> None:
    text = _line(*parts)
    console.print(Padding(text, (0, 0, 0, indent), expand=False) if indent else text)


def _print_list(console: Console, title: str, entries: list[str]) -> None:
    if not entries:
        return
    _print(console, (title, "bold"))
    for entry in entries:
        grid = Table.grid(padding=0)
        grid.add_column(width=4)
        grid.add_column(overflow="fold")
        grid.add_row("  - ", _line(entry))
        console.print(grid)


def _summary(findings: list[Finding], console: Console) -> Table:
    """One row per finding; the model's name takes what the numbers leave."""
    roomy = console.width >= 72
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold", ratio=1, min_width=12)
    table.add_column("probe", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("gap", justify="right", no_wrap=True)
    if roomy:
        table.add_column("period", justify="right", no_wrap=True)
        table.add_column("worst", justify="right", no_wrap=True)
    for f in findings:
        name = f.target + (" (control)" if f.role == "control" else "")
        cells = [_line(name), _line(f.probe), Text(SHORT[f.verdict], style=STYLES[f.verdict])]
        cells += [Text(words.number(f.accuracy)), Text(words.number(f.gap_points, 1))]
        if roomy:
            cells.append(Text("none" if f.period_tokens is None else str(f.period_tokens)))
            cells.append(Text(words.MISSING if f.worst_phase is None else str(f.worst_phase)))
        table.add_row(*cells)
    return table


def _print_finding(report: Report, finding: Finding, console: Console, *, alone: bool) -> None:
    control = words.control_of(report, finding)
    _print(console, (finding.target, "bold"), f"  ({finding.probe} probe)")
    if not alone:
        _print(console, (words.lead(finding), STYLES[finding.verdict]), finding.sentence)
    console.print()
    _print_phases(finding, control, console)
    console.print()
    _print_numbers(finding, control, console)
    for title, entries in (("Why", finding.reasons), ("What to do next", finding.advice)):
        if entries:
            console.print()
            _print_list(console, title, entries)


def _print_phases(finding: Finding, control: Finding | None, console: Console) -> None:
    """One line per phase: number, accuracy, bar with interval, control, remarks."""
    shown = control_for(finding, control)
    marks = ASCII if console.options.ascii_only else UNICODE
    phases, hidden = _phases_to_show(finding)
    remarks = {phase: _remark(finding, phase) for phase in phases}
    remark_width = max(map(len, remarks.values()), default=0)
    # "phase" and "accuracy" with two blanks each; the control's column where there is room
    with_control = shown is not None and console.width >= 56
    fixed = 5 + 2 + 8 + 2 + (2 + 7 if with_control else 0) + 2 + remark_width
    bar_width = max(min(console.width - fixed - 1, 48), 8)
    if 17 + bar_width + (9 if with_control else 0) + 2 + remark_width > console.width:
        remark_width = 0  # too narrow for remarks; the numbers below name the worst phase
    header = "phase  accuracy  " + _scale(bar_width) + ("  control" if with_control else "")
    console.print(Text(header, style="dim", no_wrap=True, overflow="crop"))
    for phase in phases:
        value = words.at_phase(finding.accuracy_by_phase, phase)
        line = Text(f"{phase:>5}  {words.number(value):>8}  ", no_wrap=True, overflow="crop")
        weak = phase in finding.weak_phases or (finding.verdict == "sensitive" and phase == finding.worst_phase)
        bar = _bar(value, finding.interval_by_phase[phase], bar_width, marks) if value is not None else " " * bar_width
        line.append(bar, style="dark_orange" if weak else "blue")
        if with_control and shown is not None:
            line.append(f"  {words.number(words.at_phase(shown.accuracy_by_phase, phase)):>7}", style="dim")
        if remark_width and remarks[phase]:
            line.append("  " + remarks[phase])
        line.rstrip()
        console.print(line)
    if hidden:
        known = [v for v in (words.at_phase(finding.accuracy_by_phase, p) for p in hidden) if v is not None]
        span = f"between {words.number(min(known))} and {words.number(max(known))}" if known else "without data"
        _print(console, f"{len(hidden)} other phases lie {span}.", indent=2)


def _phases_to_show(finding: Finding) -> tuple[list[int], list[int]]:
    """The phases to print and those left out: of a long axis the weakest, the strongest, an edge."""
    every = list(range(finding.axis_tokens))
    if len(every) <= MOST_PHASES:
        return every, []
    ranked = sorted(
        (value, phase)
        for phase, value in ((p, words.at_phase(finding.accuracy_by_phase, p)) for p in every)
        if value is not None
    )
    chosen = {phase for _, phase in ranked[:WEAKEST] + ranked[-STRONGEST:]}
    chosen |= {phase for phase in (finding.worst_phase, finding.best_phase) if phase is not None}
    chosen |= set(finding.boundary_phases[-2:])
    return sorted(chosen & set(every)), [phase for phase in every if phase not in chosen]


def _remark(finding: Finding, phase: int) -> str:
    parts = []
    if phase == finding.worst_phase:
        parts.append("worst")
    elif phase in finding.weak_phases:
        parts.append("weak")
    elif phase == finding.best_phase:
        parts.append("best")
    if phase in finding.boundary_phases:
        parts.append("chunk edge")
    return ", ".join(parts)


def _scale(width: int) -> str:
    """The ends of the accuracy axis above the bars."""
    return "0" + "1".rjust(width - 1)


def _bar(value: float, bounds: Interval, width: int, marks: Marks) -> str:
    """Draw accuracy and interval: filled up to the interval, the estimate as a dot inside it."""

    def cell(share: float) -> int:
        return min(int(max(share, 0.0) * width), width - 1)

    low, middle, high = cell(bounds[0]), cell(value), cell(bounds[1])
    low, high = min(low, middle), max(high, middle)
    cells = [marks.fill] * low + [marks.line] * (high - low + 1) + [marks.empty] * (width - high - 1)
    cells[low], cells[high] = marks.left, marks.right
    cells[middle] = marks.point
    return "".join(cells)


def _print_numbers(finding: Finding, control: Finding | None, console: Console) -> None:
    """The numbers, name on the left, value on the right; long values wrap in their own column."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    rows = [
        (
            "accuracy",
            f"{words.number(finding.accuracy, 3)} (95 % {words.interval(finding.accuracy_interval, 3)})",
        ),
        (
            "gap",
            f"{words.number(finding.gap_points, 1)} points (95 % "
            f"{words.interval(finding.gap_interval_points, 1)}; raw "
            f"{words.number(finding.raw_gap_points, 1)})",
        ),
        ("period", f"{words.period(finding)}; {words.stride(finding)}"),
        ("worst phase", words.phase_accuracy(finding, finding.worst_phase)),
        ("best phase", words.phase_accuracy(finding, finding.best_phase)),
        ("weak phases", words.phase_list(finding.weak_phases)),
        (
            "amplitude",
            f"{words.number(finding.amplitude_debiased, 3)}, at most "
            f"{words.number(finding.amplitude_upper, 3)} (95 %); margin {words.number(finding.margin, 3)}",
        ),
        (
            "prompts",
            f"{finding.prompts:,}: {words.sample(finding)}; {finding.seconds:,.1f} s",
        ),
        (
            "answers",
            ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in finding.statuses.items()) or words.MISSING,
        ),
    ]
    if consistency := words.consistency(finding):
        rows.append(("items", consistency))
    if finding.repeats:
        rows.append(("flip rate", f"{finding.flips} of {finding.repeats} repeated prompts were answered otherwise"))
    if finding.boundary is not None:
        contrast = finding.boundary
        rows.append(
            (
                "chunk edge",
                f"{words.number(contrast.straddling_accuracy, 3)} across, "
                f"{words.number(contrast.inside_accuracy, 3)} inside: "
                f"{words.number(contrast.difference_points, 1)} points",
            )
        )
    for name, value in finding.p_values.items():
        adjusted = words.p_value(finding.p_values_adjusted.get(name))
        rows.append((f"p {name}", f"{words.p_value(value)}, adjusted {adjusted}"))
    if finding.grids:
        rows.append(("grids", "; ".join(finding.grids)))
    if finding.completion is not None:
        rows.append(
            (
                "completion",
                f"8 won {finding.completion.rankings_right:,} of {finding.completion.rankings:,} rankings",
            )
        )
    if control is None:
        if finding.role == "target":
            rows.append(("control", "none took part"))
    else:
        rows.append(
            (
                "control",
                f"{control.target}: {words.VERDICT_WORDS[control.verdict].lower()}; accuracy "
                f"{words.number(control.accuracy, 3)}, gap {words.number(control.gap_points, 1)} points",
            )
        )
    for name, text in rows:
        grid.add_row(_line(name), _line(text))
    console.print(grid)
