"""Reports as real runs give them, built from simulated answers: one maker per kind of reader's day."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isophase.audit.schema import (
    SCHEMA_VERSION,
    BoundaryContrast,
    CompletionStrip,
    Finding,
    PeriodTest,
    Report,
    TrendBin,
)

SCAN = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128)
HOSTILE = "../models/<script>alert('x')</script>&\"[bold red]/" + "very-long-directory-name/" * 9 + "\x1b[31mred\u0000"


def wilson(share: float, n: int) -> tuple[float, float]:
    z2 = 1.96**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = 1.96 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def make_finding(truth: list[float], *, items: int = 64, repeats: int = 1, seed: int = 0, **changes: Any) -> Finding:
    """A finding from binary answers with the given accuracy by phase."""
    axis = len(truth)
    rng = np.random.default_rng(seed)
    y = rng.random((items, axis, repeats)) < np.array(truth)[None, :, None]
    by_phase, accuracy, n = y.mean((0, 2)), float(y.mean()), items * repeats
    coefficient = (by_phase * np.exp(2j * np.pi * np.arange(axis) / axis)).mean()
    worst, best = int(by_phase.argmin()), int(by_phase.argmax())
    intervals = [wilson(float(a), n) for a in by_phase]
    gap = 100 * float(by_phase.max() - by_phase.min())
    edge = axis - 1
    values: dict[str, Any] = {
        "role": "target",
        "target": "models/w8s8",
        "probe": "prefix",
        "verdict": "sensitive",
        "sentence": f"models/w8s8 is phase-sensitive on prefix: accuracy repeats every {axis} tokens, "
        f"best minus worst phase {gap - 1.2:.1f} points, weakest at phase {worst} with "
        f"{by_phase[worst]:.0%} right.",
        "reasons": [
            "accuracy follows the period (harmonic 1, adjusted p = 0.0015)",
            "records that straddle a chunk edge differ from the others (adjusted p = 0.0015)",
        ],
        "advice": [
            "Do not trust one placement: ask again with 1 to 7 neutral tokens added before the facts.",
            "Audit with a full-attention control (--control) to see what compression alone costs.",
        ],
        "stride_tokens": axis,
        "stride_source": "configuration",
        "period_tokens": axis,
        "axis_tokens": axis,
        "accuracy": accuracy,
        "accuracy_interval": wilson(accuracy, n * axis),
        "accuracy_by_phase": by_phase.tolist(),
        "interval_by_phase": intervals,
        "prompts_by_phase": [n] * axis,
        "log_probability_by_phase": np.log(np.clip(by_phase, 0.02, 0.985)).tolist(),
        "worst_phase": worst,
        "best_phase": best,
        "weak_phases": [p for p, (_, high) in enumerate(intervals) if high < accuracy],
        "boundary_phases": [edge],
        "gap_points": gap - 1.2,
        "gap_interval_points": (gap - 5.0, gap + 2.0),
        "raw_gap_points": gap,
        "p_values": {"harmonic": 0.0005, "omnibus": 0.0005, "boundary": 0.0005},
        "p_values_adjusted": {"harmonic": 0.0015, "omnibus": 0.0015, "boundary": 0.0015},
        "amplitude": 2 * abs(coefficient),
        "amplitude_debiased": max(2 * abs(coefficient) - 0.004, 0.0),
        "amplitude_upper": 2 * abs(coefficient) + 0.03,
        "harmonic_phase_radians": float(np.angle(coefficient)),
        "margin": 0.02,
        "boundary": BoundaryContrast(
            straddling_accuracy=float(by_phase[edge]),
            inside_accuracy=float(np.delete(by_phase, edge).mean()),
            difference_points=100 * float(np.delete(by_phase, edge).mean() - by_phase[edge]),
            p_value=0.0005,
            mcnemar_p_value=1e-9,
        ),
        "scan": make_scan(axis, rng),
        "scan_line_z": 5.9,
        "trend": make_trend(accuracy, n),
        "heat_map": y.mean(2).tolist(),
        "completion": None,
        "prompts": n * axis,
        "items": items,
        "records": 24,
        "length_tokens": 128,
        "statuses": {"ok": n * axis - 2, "wrong_format": 2, "truncated": 0, "error": 0},
        "more_prompts_to_decide": None,
        "seed": 7,
        "seconds": 12.3456789,
    }
    return Finding(**(values | changes))


def make_scan(axis: int, rng: np.random.Generator, *, strength: float = 46.0) -> list[PeriodTest]:
    tests = []
    for period in SCAN:
        related = period % axis == 0 or axis % period == 0
        z = strength / (1 + abs(math.log2(period / axis))) if related else float(rng.exponential())
        tests.append(
            PeriodTest(
                period_tokens=period,
                z=z,
                p_value=math.exp(-z),
                p_adjusted=min(1.0, 12 * math.exp(-z)),
                amplitude=0.03 * math.sqrt(z),
                amplitude_upper=0.03 * math.sqrt(z) + 0.03,
                control=period % 2 == 1,
            )
        )
    return tests


def make_trend(accuracy: float, n: int) -> list[TrendBin]:
    bins = []
    for index in range(6):
        share = min(max(accuracy + 0.02 * (index - 2.5), 0.0), 1.0)
        bins.append(
            TrendBin(
                first_position_tokens=8 + 18 * index,
                last_position_tokens=25 + 18 * index,
                accuracy=share,
                interval=wilson(share, n),
                prompts=n,
            )
        )
    return bins


def make_report(*findings: Finding, notes: list[str] | None = None) -> Report:
    first = findings[0]
    control = next((f for f in findings if f.role == "control" and f.probe == first.probe), None)
    fields = {name: getattr(first, name) for name in Finding.model_fields}
    return Report(
        **fields,
        schema_version=SCHEMA_VERSION,
        isophase_version="0.1.0",
        control=control,
        findings=list(findings),
        notes=notes if notes is not None else ["Prefix caching could not be ruled out: the server does not say."],
    )


def sensitive() -> Report:
    target = make_finding([0.97, 0.99, 0.98, 1.0, 0.99, 0.97, 0.96, 0.04])
    control = make_finding(
        [1.0] * 8,
        role="control",
        target="models/full",
        verdict="none",
        sentence="models/full shows no phase sensitivity above the margin on prefix: accuracy 100.0%.",
        period_tokens=None,
        boundary=None,
        boundary_phases=[],
        amplitude=0.0,
        amplitude_debiased=0.0,
        amplitude_upper=0.011,
        gap_points=0.0,
        gap_interval_points=(0.0, 0.0),
    )
    return make_report(target, control)


def none() -> Report:
    return make_report(
        make_finding(
            [0.93] * 8,
            items=400,
            verdict="none",
            target="models/content-defined",
            sentence="models/content-defined shows no phase sensitivity above the margin on prefix: "
            "accuracy 93.5%, amplitude at most 0.017 (margin 0.02), gap -0.4 points (95 % -2.1 to 1.6).",
            period_tokens=None,
            stride_tokens=None,
            stride_source="scan",
            weak_phases=[],
            boundary=None,
            boundary_phases=[],
            amplitude_upper=0.017,
            p_values={"scan": 0.41},
            p_values_adjusted={"scan": 0.41},
            scan=make_scan(8, np.random.default_rng(3), strength=1.5),
            gap_points=-0.4,
            gap_interval_points=(-2.1, 1.6),
            reasons=["an amplitude of the margin or more is excluded (95 % upper limit 0.017)"],
            advice=["Nothing to do for this probe, length and number of records."],
        ),
        notes=[],
    )


def nothing_right() -> Report:
    return make_report(
        make_finding(
            [0.0] * 8,
            verdict="inconclusive",
            sentence="models/w8s8 on prefix is inconclusive: accuracy 0.0%, amplitude 0.000 with an "
            "upper limit of 0.030.",
            reasons=["the model answered nothing right, so there is no accuracy that could depend on the phase"],
            advice=["Make the task easier: fewer --records, a shorter --length, or --demonstrations 2."],
            period_tokens=None,
            weak_phases=[],
            scan=[],
            scan_line_z=None,
            more_prompts_to_decide=4_000,
            statuses={"ok": 190, "wrong_format": 312, "truncated": 6, "error": 4},
        )
    )


def long_axis() -> Report:
    truth = [0.85 + 0.08 * math.cos(2 * math.pi * (r - 20) / 128) for r in range(127)] + [0.12]
    target = make_finding(
        truth,
        items=230,
        target="hf:deepseek/v4-hca",
        dropped_items=2,
        scan_period_tokens=64,
        grids=["HCA: window 128, stride 128"],
        stride_tokens=128,
        length_tokens=4096,
    )
    heat = [list(row) for row in target.heat_map]
    for row in range(0, 230, 7):
        heat[row][5:40] = [None] * 35
    return make_report(target.model_copy(update={"heat_map": heat}))


def strip() -> CompletionStrip:
    lengths = list(range(64))
    families = ["thirty-two divided by four is", "half of sixteen is", "<b>4 + 4</b> = " + "x" * 60]
    right = [[0.3 + 0.28 * math.cos(2 * math.pi * (n + 2 * f) / 8) for n in lengths] for f in range(3)]
    wrong = [[0.24 - 0.2 * math.cos(2 * math.pi * (n + 2 * f) / 8) for n in lengths] for f in range(3)]
    return CompletionStrip(
        families=families,
        filler_tokens=lengths,
        p_right=right,
        p_wrong=wrong,
        right_wins_by_phase=[1.0, 1.0, 0.9, 0.67, 0.12, 0.3, 0.9, 1.0],
        rankings=192,
        rankings_right=141,
    )


def completion() -> Report:
    truth = [1.0, 1.0, 0.9, 0.67, 0.12, 0.3, 0.9, 1.0]
    return make_report(
        make_finding(truth, probe="completion", completion=strip(), trend=[], boundary=None, boundary_phases=[])
    )


def hostile() -> Report:
    """Foreign text everywhere, unknown values, and a control over another axis."""
    report = sensitive()
    target, control = report.findings
    unknown: list[float | None] = [*target.accuracy_by_phase]
    unknown[3] = None
    target = target.model_copy(
        update={
            "target": HOSTILE,
            "sentence": f"<script>alert(1)</script> [red]said[/red] \x1b[2J {HOSTILE} is phase-sensitive.",
            "reasons": ["<img src=https://example.org/x.png>"],
            "accuracy_by_phase": unknown,
            "log_probability_by_phase": [None] * 8,
            "worst_phase": None,
            "best_phase": None,
            "trend": [],
            "heat_map": [],
            "statuses": {"ok": 500, "<i>odd</i>": 12},
        }
    )
    longer = make_finding([1.0] * 12, role="control", target="models/full<&>", verdict="none", period_tokens=None)
    dense = control.model_copy(update={"probe": "needle"})
    return make_report(target, longer, dense, notes=["</style><script>alert(2)</script>"])


def several() -> Report:
    base, dense = sensitive().findings
    other = none().findings[0]
    return make_report(
        base,
        dense,
        other.model_copy(update={"probe": "needle"}),
        nothing_right().findings[0].model_copy(update={"probe": "needle", "target": "models/w8s8-1head"}),
        completion().findings[0],
    )


def voted() -> Report:
    """One model asked once, twice, four times, and four times a whole chunk apart, in an order of its own."""
    weak = [1.0] * 7 + [0.3]
    asked = {
        "|vote(4)": (4, [1.0] * 8),
        "": (1, weak),
        "|vote(0:8:16:24)": (4, weak),
        "|vote(2)": (2, [1.0] * 7 + [0.97]),
    }
    findings = [make_finding(truth, reads=reads, target="models/w8s8" + vote) for vote, (reads, truth) in asked.items()]
    return make_report(*findings, make_finding(weak, target="models/other<&>"))


MAKERS: dict[str, Callable[[], Report]] = {
    maker.__name__: maker for maker in (sensitive, none, nothing_right, long_axis, completion, hostile, several, voted)
}


@pytest.fixture(params=sorted(MAKERS))
def report(request: pytest.FixtureRequest) -> Report:
    """Every kind of report in turn."""
    return MAKERS[request.param]()


@pytest.fixture
def make() -> Callable[[str], Report]:
    """One kind of report by name."""
    return lambda name: MAKERS[name]()
