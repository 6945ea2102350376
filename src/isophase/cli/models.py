"""`isophase models`: the bundled models."""

from __future__ import annotations

from json import dumps

from isophase.cli import options as opt
from isophase.models import bundled_names, memory_words, training_record


def models(json: opt.Json = None) -> None:
    """The bundled models: what they are and how they were trained."""
    records = [training_record(name) for name in bundled_names()]
    opt.write_json(dumps([record.model_dump() for record in records], indent=2) + "\n", json)
    console = opt.console_for_people(json)
    for record in records:
        console.print(f"isophase:{record.name}  {record.purpose}")
        console.print(
            f"    compression {memory_words(record.name)}, {record.layers} layers, width {record.hidden_size}, "
            f"{record.kv_heads} KV, {record.parameters:,} parameters, {record.weights_bytes / 1000:.0f} kB"
        )
        console.print(
            f"    trained {record.steps:,} steps, {record.seconds / 60:.1f} min, seed {record.seed}, "
            f"accuracy {record.final_accuracy:.2f}"
        )
    console.print("\nAccuracy: on the last training steps, all queries. More: docs/guides/train-matched-models.md.")
