"""Draw the charts of docs/results from the measured figures in bench/results and docs/sweeps; measures nothing.

    python bench/figures.py                     writes docs/results/*.svg
    python bench/figures.py --only cure         one chart

The same files and the same matplotlib give the same bytes. Charts have a light ground of their own, so they read in
light and dark pages, and letters that stay readable at 400 pixels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
SWEEPS = ROOT / "docs" / "sweeps"
OUT = ROOT / "docs" / "results"

ORANGE, BLUE, GREEN, PURPLE, GREY = "#c8501e", "#1f6fb2", "#2a8f63", "#8a4f9e", "#7a828a"
STYLE = {
    "svg.hashsalt": "isophase",
    "svg.fonttype": "path",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#545d67",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e4e0",
    "figure.facecolor": "#fcfcfa",
    "axes.facecolor": "#fcfcfa",
    "savefig.facecolor": "#fcfcfa",
    "legend.frameon": False,
    "legend.fontsize": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def runs(sweep: str, probe: str = "audit-records") -> dict[str, dict[str, Any]]:
    """Rows of a sweep's table by run, for one of its audits."""
    return {row["run"]: row for row in read(SWEEPS / sweep / "table.json")["rows"] if row.get("audit", probe) == probe}


def share_axis(axes: Axes, label: str = "share right") -> None:
    axes.set_ylim(-0.03, 1.05)
    axes.set_yticks([0, 0.5, 1])
    axes.set_ylabel(label)


def cure() -> Figure:
    """Accuracy by phase, fixed grid against chunks at records, three strides, three seeds each."""
    figure, rows = plt.subplots(3, 1, figsize=(5, 7.4), constrained_layout=True)
    for axes, stride in zip(rows, (4, 8, 12), strict=True):
        table = runs(f"cure-{stride}")
        for memory, colour in (("fixed", ORANGE), ("keys", BLUE)):
            for seed, mark in ((2, "o"), (3, "s"), (4, "^")):
                row = table[f"{memory}-seed{seed}"]
                # A model in which the scan finds no period has no axis of its own: its curve is drawn over 8 phases.
                curve = row["accuracy_by_phase"]
                axes.plot(range(len(curve)), curve, color=colour, marker=mark, ms=5, lw=1.6, alpha=0.9)
        axes.set_title(f"one entry for {stride} tokens")
        axes.set_xticks(range(0, 12 if stride == 12 else 8))
        share_axis(axes)
    rows[-1].set_xlabel("phase of the record, tokens")
    names = [Line2D([], [], color=ORANGE, lw=2), Line2D([], [], color=BLUE, lw=2)]
    figure.legend(names, ["fixed grid", "chunks at records"], loc="outside upper center", ncols=2)
    return figure


def strides() -> Figure:
    """Accuracy by phase for four strides: the weak phase is the last before the boundary."""
    figure, grid = plt.subplots(2, 2, figsize=(5, 4.8), constrained_layout=True, sharey=True)
    table = runs("strides")
    for axes, (stride, names) in zip(
        grid.flat,
        ((4, ["w4s4"]), (6, ["w6s6"]), (8, ["w8s8-seed2", "w8s8-seed3", "w8s8-seed4"]), (12, ["w12s12"])),
        strict=True,
    ):
        for name in names:
            curve = table[name]["accuracy_by_phase"]
            axes.plot(range(stride), curve, color=ORANGE, marker="o", ms=4, lw=1.6)
        axes.axhline(table["full"]["mean"], color=GREY, lw=1.6, ls="--")
        axes.set_title(f"W{stride}/S{stride}")
        axes.set_xticks(range(stride) if stride < 12 else (0, 3, 6, 9, 11))
        axes.set_ylim(-0.03, 1.05)
        axes.set_yticks([0, 0.5, 1])
    for axes in grid[:, 0]:
        axes.set_ylabel("share right")
    for axes in grid[1]:
        axes.set_xlabel("phase, tokens")
    names = [Line2D([], [], color=ORANGE, lw=2, marker="o"), Line2D([], [], color=GREY, lw=2, ls="--")]
    figure.legend(names, ["compressed", "full attention"], loc="outside upper center", ncols=2)
    return figure


def interval_line(
    axes: Axes, x: list[float], found: list[dict[str, float]], colour: str, mark: str, label: str, ls: str = "-"
) -> None:
    """A line through accuracies, each with its interval."""
    y = [point["accuracy"] for point in found]
    spread = [
        [a - point["lower"] for a, point in zip(y, found, strict=True)],
        [point["upper"] - a for a, point in zip(y, found, strict=True)],
    ]
    axes.errorbar(x, y, yerr=spread, color=colour, marker=mark, ms=6, lw=1.8, ls=ls, capsize=3, label=label)


def cache_needles() -> Figure:
    """Codes found against entries kept, prompts of 1,000 tokens."""
    figure, axes = plt.subplots(figsize=(5, 4.4), constrained_layout=True)
    budgets = [64, 96, 128, 256, 512]
    old = {m["cache"]: m["overall"] for m in read(RESULTS / "needle_1000.json")["methods"]}
    new = {m["cache"]: m["overall"] for m in read(RESULTS / "needle_1000_chunks_48.json")["methods"]}
    # Shifted a little along the axis, so that intervals do not hide each other.
    for factor, found, spec, colour, mark, label in (
        (1.03, new, "dynamic(budget={}, max_tokens=48)", BLUE, "o", "chunks by content"),
        (1.0, old, "chunkkv(budget={})", ORANGE, "s", "ChunkKV, chunks of 10"),
        (0.97, old, "snapkv(budget={}, window_tokens=16)", GREY, "^", "SnapKV, single tokens"),
    ):
        interval_line(
            axes, [b * factor for b in budgets], [found[spec.format(b)] for b in budgets], colour, mark, label
        )
    interval_line(axes, [128 * 1.07], [old["voted(budget=128)"]], GREEN, "D", "voted chunks", "none")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(b) for b in budgets])
    axes.minorticks_off()
    axes.set_xlabel("entries kept in each KV head, of 1,000")
    share_axis(axes, "codes found")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def cache_phase() -> Figure:
    """Codes found by phase, fifty depths of 300 tokens."""
    figure, axes = plt.subplots(figsize=(5, 4.4), constrained_layout=True)
    found = {m["cache"].partition("(")[0]: m["by_phase"] for m in read(RESULTS / "needle_300.json")["methods"]}
    for shift, name, colour, mark, label in (
        (0.09, "voted", GREEN, "D", "voted chunks"),
        (-0.09, "dynamic", BLUE, "o", "chunks by content"),
        (0.0, "chunkkv", ORANGE, "s", "ChunkKV, chunks of 10"),
        (0.0, "snapkv", GREY, "^", "SnapKV, single tokens"),
    ):
        interval_line(axes, [phase + shift for phase in range(10)], found[name], colour, mark, label)
    axes.set_xticks(range(10))
    axes.set_xlabel("phase of the code, tokens")
    share_axis(axes, "codes found")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def prefill_speed() -> Figure:
    """How many times faster than dense attention, by length."""
    figure, axes = plt.subplots(figsize=(5, 3.8), constrained_layout=True)
    found = (
        read(RESULTS / "prefill_speed_2threads.json")["found"] + read(RESULTS / "prefill_speed_131072.json")["found"]
    )
    x = [row["tokens"] for row in found]
    median, low, high = zip(*(row["times_faster"] for row in found), strict=True)
    spread = [[m - a for m, a in zip(median, low, strict=True)], [b - m for m, b in zip(median, high, strict=True)]]
    axes.errorbar(x, median, yerr=spread, color=BLUE, marker="o", ms=6, lw=1.8, capsize=3, label="attention alone")
    model = read(RESULTS / "prefill_model.json")["found"]
    axes.plot(
        [row["tokens"] for row in model],
        [row["times_faster"][0] for row in model],
        color=ORANGE,
        marker="s",
        ms=6,
        lw=1.8,
        label="whole SmolLM2-135M",
    )
    axes.axhline(1, color=GREY, lw=1.4, ls="--")
    axes.axvline(found[0]["threshold"], color=GREY, lw=1.2, ls=":")
    axes.text(found[0]["threshold"] * 0.93, 22, "read densely\nbelow 7,168", ha="right", va="center", fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, ["2k", "4k", "8k", "16k", "32k", "128k"])
    axes.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    axes.minorticks_off()
    axes.set_xlabel("tokens in the prompt")
    axes.set_ylabel("times faster than dense")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def prefill_quality() -> Figure:
    """Recall against keys read: patterns chosen per head, against one setting for all heads."""
    figure, axes = plt.subplots(figsize=(5, 4.4), constrained_layout=True)
    found = read(RESULTS / "prefill_frontier.json")["found"]
    for start, colour, mark, label in (
        ("adaptive", BLUE, "o", "chosen per head (auto)"),
        ("VerticalSlash", ORANGE, "s", "vertical-slash, one size"),
        ("AShape", GREY, "^", "A-shape, one size"),
    ):
        rows = [row for row in found if row["policy"].startswith(start)]
        axes.plot(
            [r["density"] for r in rows],
            [r["recall"] for r in rows],
            color=colour,
            marker=mark,
            ms=6,
            lw=1.8,
            label=label,
        )
        axes.plot(
            [r["density"] for r in rows],
            [r["worst_tenth"] for r in rows],
            color=colour,
            marker=mark,
            ms=6,
            lw=1.4,
            ls="--",
            mfc="#fcfcfa",
        )
    axes.set_xlabel("share of keys read")
    axes.set_ylabel("share of attention kept")
    axes.set_ylim(0.5, 1.02)
    axes.text(
        0.985, 0.03, "full: all heads\ndashed, open: worst tenth", transform=axes.transAxes, ha="right", fontsize=11
    )
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def prefill_phase() -> Figure:
    """Whether a needle of eight tokens is read, by its phase in a block of 64."""
    figure, axes = plt.subplots(figsize=(5, 3.4), constrained_layout=True)
    found = {row["selection"]: row["by_phase"] for row in read(RESULTS / "prefill_phase.json")["found"]}
    axes.plot(range(64), found["blocks, fixed grid"], color=ORANGE, marker="s", ms=3.5, lw=1.6, label="fixed grid")
    axes.plot(
        range(64), found["blocks, half-shifted"], color=BLUE, marker="o", ms=3.5, lw=1.6, label="half-shifted windows"
    )
    axes.set_xticks([0, 16, 32, 48, 57, 63])
    axes.set_xlabel("phase of the needle, tokens")
    share_axis(axes, "needle read")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def retrieval_quality() -> Figure:
    """Difference to naive vectors by rule, late and blended, two sets of questions."""
    figure, columns = plt.subplots(1, 2, figsize=(5.4, 5.2), constrained_layout=True, sharey=True)
    for axes, name in zip(columns, ("faq", "library"), strict=True):
        rules = read(RESULTS / f"retrieval_quality_{name}.json")[name]["rule"]
        for row, found in enumerate(rules.values()):
            for vectors, shift, colour, mark in (("blended .5", -0.14, BLUE, "o"), ("late", 0.14, ORANGE, "s")):
                middle, low, high = found[vectors]["chunk_ndcg_minus_naive"]
                axes.errorbar(
                    middle,
                    row + shift,
                    xerr=[[middle - low], [high - middle]],
                    color=colour,
                    marker=mark,
                    ms=5,
                    capsize=2.5,
                )
        axes.axvline(0, color="#545d67", lw=1.2)
        axes.set_yticks(range(len(rules)), list(rules))
        axes.set_title(name)
        axes.set_xlim(-0.06, 0.13)
        axes.set_xticks([-0.05, 0, 0.05, 0.1], ["-.05", "0", ".05", ".10"])
    columns[0].invert_yaxis()
    figure.supxlabel("nDCG@10, difference to naive vectors", fontsize=12)
    names = [Line2D([], [], color=BLUE, marker="o", lw=1.8), Line2D([], [], color=ORANGE, marker="s", lw=1.8)]
    figure.legend(names, ["blended, half and half", "late"], loc="outside upper center", ncols=2)
    return figure


CHARTS: dict[str, Callable[[], Figure]] = {
    "cure": cure,
    "period-follows-stride": strides,
    "cache-needles": cache_needles,
    "cache-phase": cache_phase,
    "prefill-speed": prefill_speed,
    "prefill-quality": prefill_quality,
    "prefill-phase": prefill_phase,
    "retrieval-quality": retrieval_quality,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the charts of docs/results.")
    parser.add_argument("--only", choices=sorted(CHARTS), help="one chart")
    chosen = parser.parse_args().only
    for name, draw in CHARTS.items():
        if chosen in (None, name):
            with plt.rc_context(STYLE):
                figure = draw()
                figure.savefig(OUT / f"{name}.svg", metadata={"Date": None, "Creator": None})
                plt.close(figure)
            print(f"docs/results/{name}.svg")


if __name__ == "__main__":
    main()
