"""The result of a sweep: `table.json`, `table.md` in the paper's form, and one page with all curves.

A pure function of the sweep's folder; the same bytes whichever engine ran it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from isophase.atomic import write_atomically
from isophase.audit import MANIFEST, Interval, Report, read_plan
from isophase.audit.report import Plot, nice_ticks
from isophase.lab.sweep.grid import Run, Sweep, is_finished
from isophase.lab.sweep.memory_use import MemoryUse, memory_use
from isophase.models import CompressedQwen3Config, TrainingRecord
from isophase.probes import build_probe
from isophase.targets import HuggingFaceTokenizer

_COUNTED_PROMPTS = 48


class Row(BaseModel):
    """One audit of one run in `table.json`."""

    model_config = ConfigDict(frozen=True)

    run: str
    audit: str = Field(description="folder of its result")
    probe: str
    vote_shifts: tuple[int, ...] = Field(description="neutral tokens of each shift of a vote; empty: no vote")
    seed: int
    window_tokens: int | None = Field(description="null: full attention")
    stride_tokens: int | None
    memory: str = Field(description="how the cache is cut, in words")
    tokens_per_entry: float | None = Field(description="measured on the audit's prompts; null: no entries, or unknown")
    exact_tokens: float | None = Field(description="that the answering token reads; null: unknown")
    kv_heads: int
    parameters: int
    steps: int
    validation_loss: float | None = Field(description="of text that is held out; null where the recipe has none")
    final_loss: float = Field(description="of training, where no sequence comes twice in lookup")
    mean: float = Field(description="accuracy over all phases")
    mean_interval: Interval
    worst: float | None = Field(description="lowest accuracy of all phases")
    worst_interval: Interval | None
    worst_phase: int | None
    prompts: int
    items_always_right: int | None = Field(description="items right at every position")
    items_never_right: int | None = Field(description="items wrong at every position")
    items: int
    gap_points: float
    gap_interval_points: Interval
    stride_source: str = Field(description="what the test of the verdict was told")
    period_tokens: int | None = Field(description="found by a scan that is told nothing; null: none")
    verdict: str
    accuracy_by_phase: list[float | None]
    interval_by_phase: list[Interval]


def write_tables(sweep: Sweep, out: Path, failed: dict[str, str]) -> list[Row]:
    """Write the three files from the runs that are finished.

    Args:
        sweep: the runs.
        out: folder of the sweep.
        failed: what went wrong, by run.

    Returns:
        The rows, in the sweep's order.
    """
    finished = [run for run in sweep.runs if is_finished(run, sweep, out)]
    rows = [_row(run, out, audit) for audit in sweep.audits for run in finished if audit in sweep.audits_of(run.name)]
    curves = {run.name: read_curve(out / "runs" / run.name / "model" / "curve.jsonl") for run in finished}
    missing = [run.name for run in sweep.runs if run not in finished]
    table = {"sweep": sweep.name, "rows": [row.model_dump() for row in rows], "missing": missing, "failed": failed}
    write_atomically(out / "table.json", json.dumps(table, indent=2) + "\n")
    write_atomically(out / "table.md", markdown(rows))
    write_atomically(out / "index.html", page(sweep.name, rows, curves, missing))
    return rows


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The points of a `curve.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(run: Run, out: Path, audit: str) -> Row:
    folder = out / "runs" / run.name
    record = TrainingRecord.model_validate_json((folder / "model" / "training.json").read_text(encoding="utf-8"))
    report = Report.model_validate_json((folder / audit / "report.json").read_text(encoding="utf-8"))
    # Where all phases are alike, none is named the worst; any of them is then as bad as it gets.
    known = [phase for phase, value in enumerate(report.accuracy_by_phase) if value is not None]
    worst = report.worst_phase
    lowest = worst if worst is not None else min(known, key=lambda p: report.accuracy_by_phase[p] or 0.0, default=None)
    use = _memory_use(folder, audit)
    return Row(
        run=run.name,
        audit=audit,
        probe=report.probe,
        vote_shifts=vote_shifts(folder / audit),
        seed=record.seed,
        window_tokens=record.window_tokens,
        stride_tokens=record.stride_tokens,
        memory=memory_name(run.recipe.model, record),
        tokens_per_entry=None if use is None else use.tokens_per_entry,
        exact_tokens=None if use is None else use.exact_tokens,
        kv_heads=record.kv_heads,
        parameters=record.parameters,
        steps=record.steps,
        validation_loss=read_curve(folder / "model" / "curve.jsonl")[-1].get("validation_loss"),
        final_loss=record.final_loss,
        mean=report.accuracy,
        mean_interval=report.accuracy_interval,
        worst=None if lowest is None else report.accuracy_by_phase[lowest],
        worst_interval=None if lowest is None else report.interval_by_phase[lowest],
        worst_phase=worst,
        prompts=report.prompts,
        items_always_right=report.items_always_right,
        items_never_right=report.items_never_right,
        items=report.items,
        gap_points=report.gap_points,
        gap_interval_points=report.gap_interval_points,
        stride_source=report.stride_source,
        period_tokens=report.scan_period_tokens,
        verdict=report.verdict,
        accuracy_by_phase=report.accuracy_by_phase,
        interval_by_phase=report.interval_by_phase,
    )


def memory_name(model: dict[str, Any], record: TrainingRecord) -> str:
    """How a recipe's model cuts its cache: `full`, `8/8`, `8/8, shifted by heads`, `local_maximum of hash, 4 sinks`."""
    rule, shift = model.get("chunk_rule", "fixed"), model.get("grid_shift", "none")
    if rule != "fixed":
        words = [f"{rule} of {model.get('chunk_score', 'hash')}"]
    elif record.stride_tokens is None:
        return "full"
    else:
        words = [f"{record.window_tokens}/{record.stride_tokens}"]
    words += [f"shifted by {shift}"] if shift != "none" else []
    words += ["count bias"] if model.get("count_bias") else []
    words += [f"{model['sink_tokens']} sinks"] if model.get("sink_tokens") else []
    return ", ".join(words)


def vote_shifts(audit: Path) -> tuple[int, ...]:
    """Shifts of the vote that an audit measured; empty without one."""
    manifest = json.loads((audit / MANIFEST).read_text(encoding="utf-8"))
    (part,) = manifest["parts"].values()
    return tuple(part.get("vote_shifts", ()))


def _memory_use(folder: Path, audit: str) -> MemoryUse | None:
    """Count the memory of a run on some of its audit's prompts; None for models of another kind."""
    config = AutoConfig.from_pretrained(folder / "model")
    if not isinstance(config, CompressedQwen3Config):
        return None
    embed, routers = None, []
    if config.chunk_rule != "fixed" and config.chunk_score in ("cosine", "router"):
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        embed, routers = model.get_input_embeddings(), list(model.model.routers)
    probe = build_probe(
        read_plan(folder / audit).parts[0].probe,
        HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder / "model")),
    )
    step = max(1, len(probe) // _COUNTED_PROMPTS)
    return memory_use(config, (probe.prompt(row) for row in range(0, len(probe), step)), embed, routers)


HEADINGS = (
    "run",
    "memory",
    "tokens per entry + exact",
    "seed",
    "loss",
    "mean",
    "worst",
    "gap, points",
    "right everywhere, nowhere",
    "period",
    "verdict",
)


def cells(row: Row) -> list[str]:
    """One row of the table, as text."""
    cost = "n/a" if row.exact_tokens is None else f"{row.exact_tokens:.1f}"
    if row.tokens_per_entry is not None:
        cost = f"{row.tokens_per_entry:.2f} + {cost}"
    loss = row.final_loss if row.validation_loss is None else row.validation_loss
    worst = "n/a"
    if row.worst is not None and row.worst_interval is not None:
        worst = f"{row.worst:.3f} ({row.worst_interval[0]:.3f} to {row.worst_interval[1]:.3f})"
    return [
        row.run,
        row.memory,
        cost,
        str(row.seed),
        f"{loss:.4f}",
        f"{row.mean:.3f} ({row.mean_interval[0]:.3f} to {row.mean_interval[1]:.3f})",
        worst,
        f"{row.gap_points:.1f} ({row.gap_interval_points[0]:.1f} to {row.gap_interval_points[1]:.1f})",
        _consistency(row),
        "none" if row.period_tokens is None else str(row.period_tokens),
        row.verdict,
    ]


def _consistency(row: Row) -> str:
    if row.items_always_right is None or row.items_never_right is None:
        return "n/a"
    return f"{row.items_always_right}, {row.items_never_right} of {row.items}"


def markdown(rows: list[Row]) -> str:
    """The table in Markdown, with 95 % intervals."""
    tables = []
    for title, own in by_audit(rows):
        lines = [HEADINGS, ("---",) * len(HEADINGS), *(cells(row) for row in own)]
        table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
        tables.append(f"{title}\n\n{table}")
    return (
        "\n".join(tables)
        + "\nLoss: on text that is held out, where the recipe has such, else of the last training steps. Mean and "
        "worst: accuracy over all phases and at the worst one. Gap: best minus worst, cross-fitted. Intervals: 95 %. "
        "Period: found by a scan that is not told the stride. Tokens per entry + exact: what the memory holds when the "
        "answer is asked for. Right everywhere, nowhere: items that do not depend on their position; what is right "
        "nowhere is lost by content.\n"
    )


def by_audit(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each audit, with what was asked."""
    found = []
    for audit in dict.fromkeys(row.audit for row in rows):
        own = [row for row in rows if row.audit == audit]
        voted = f", voted over {len(own[0].vote_shifts)} shifts" if own[0].vote_shifts else ""
        found.append((f"Probe `{own[0].probe}`{voted}, {own[0].prompts:,} prompts a run:", own))
    return found


def page(name: str, rows: list[Row], curves: dict[str, list[dict[str, Any]]], missing: list[str]) -> str:
    """One page: the table, accuracy by phase of every run, all training curves."""
    runs = [{"row": row, "phases": _phases(row), "curve": _curve(row.run, curves[row.run])} for row in rows]
    template = Environment(autoescape=True).from_string(_PAGE)
    tables = [(title.replace("`", ""), [cells(row) for row in own]) for title, own in by_audit(rows)]
    return template.render(name=name, tables=tables, headings=HEADINGS, runs=runs, missing=missing)


def _phases(row: Row) -> Markup:
    plot = Plot(f"accuracy by phase of {row.run}", height_px=150)
    plot.value_axis([0, 0.5, 1], "accuracy", 1)
    count = len(row.accuracy_by_phase)
    for phase, (value, interval) in enumerate(zip(row.accuracy_by_phase, row.interval_by_phase, strict=True)):
        middle = (phase + 0.5) / count
        plot.text(middle, plot.base_px + 16, str(phase))
        if value is not None:
            title = f"phase {phase}: {value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
            plot.rect((phase + 0.15) / count, (phase + 0.85) / count, 0, value, "bar", title)
            plot.line(middle, middle, *interval, "whisker")
    plot.text(0.5, plot.base_px + 34, "phase, tokens", "axis")
    return plot.markup()


def _curve(name: str, points: list[dict[str, Any]]) -> Markup:
    last = points[-1]["step"]
    losses = [(point["step"] / last, point["loss"]) for point in points]
    ticks = nice_ticks(0, max(value for _, value in losses))
    plot = Plot(f"training curve of {name}", height_px=150, low=0, high=ticks[-1])
    plot.value_axis(ticks, "loss", 1)
    plot.curve(losses, "loss")
    held_out = [(p["step"] / last, p["validation_loss"]) for p in points if "validation_loss" in p]
    plot.curve(held_out, "held")
    plot.text(0, plot.base_px + 16, "0", anchor="start")
    plot.text(1, plot.base_px + 16, f"{last:,} steps", anchor="end")
    return plot.markup()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>isophase sweep: {{ name }}</title>
<style>
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1a2026; --soft: #545d67; --rule: #d9dbd6; --blue: #4a86ba;
  --orange: #a3480a; }
@media (prefers-color-scheme: dark) { :root { --paper: #13171b; --ink: #e7e5e0; --soft: #a2abb4; --rule: #343b42;
  --blue: #5795c9; --orange: #f3a468; } }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1120px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: 4px 14px 4px 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
section { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  gap: 24px; margin-top: 36px; }
h2 { grid-column: 1 / -1; margin: 0; font-size: 1.1rem; border-top: 2px solid var(--ink); padding-top: 10px; }
h2 small { color: var(--soft); font-weight: 400; }
.plot { display: block; width: calc(100% - 46px); margin-left: 42px; overflow: visible; }
.plot text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--rule); } .base { stroke: var(--soft); } .bar { fill: var(--blue); }
.whisker { stroke: var(--ink); stroke-width: 1.6; }
.loss, .held { fill: none; stroke: var(--blue); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.held { stroke: var(--orange); }
p { color: var(--soft); }
</style>
</head>
<body>
<h1>Sweep {{ name }}</h1>
{% for title, rows in tables %}<p>{{ title }}</p>
<div class="scroll"><table>
<tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
<p>Intervals are 95 %. The period comes from a scan that is not told the stride. Curves: training loss blue, loss on
text that is held out orange.</p>
{% if missing %}<p>Not finished: {{ missing | join(", ") }}.</p>{% endif %}
{% for run in runs %}<section>
<h2>{{ run.row.run }}
<small>{{ run.row.probe }}{{ ", voted" if run.row.vote_shifts }}: {{ run.row.verdict }}</small></h2>
<div>{{ run.phases }}</div>
<div>{{ run.curve }}</div>
</section>
{% endfor %}</body>
</html>
"""
