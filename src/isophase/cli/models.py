"""`isophase models`: the bundled models."""

from __future__ import annotations

from json import dumps

from rich.table import Table

from isophase.cli import options as opt
from isophase.models.bundled import bundled_names, training_record


def models(json: opt.Json = None) -> None:
    """The bundled models: what they are and how they were trained."""
    records = [training_record(name) for name in bundled_names()]
    opt.write_json(dumps([record.model_dump() for record in records], indent=2) + "\n", json)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "target",
        "window/stride",
        "KV heads",
        "parameters",
        "kB",
        "steps",
        "minutes",
        "accuracy",
        "purpose",
    ):
        table.add_column(heading, justify="left" if heading in ("target", "purpose") else "right")
    for record in records:
        grid = "none" if record.stride_tokens is None else f"{record.window_tokens}/{record.stride_tokens}"
        table.add_row(
            f"isophase:{record.name}",
            grid,
            str(record.kv_heads),
            f"{record.parameters:,}",
            f"{record.weights_bytes / 1000:.0f}",
            f"{record.steps:,}",
            f"{record.seconds / 60:.1f}",
            f"{record.final_accuracy:.2f}",
            record.purpose,
        )
    console = opt.console_for_people(json)
    console.print(table)
    console.print("\nAccuracy: on the last training steps, all queries. Recipes and curves: docs/training.md.")
