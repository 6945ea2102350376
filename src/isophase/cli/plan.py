"""`isophase plan`: what an audit would ask, and what it could find."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from isophase.audit.plan import make_plan, outlook
from isophase.cli import options as opt


def plan(
    targets: opt.Targets = None,
    control: opt.Control = None,
    probe: opt.ProbeOption = "records",
    stride: opt.Stride = "auto",
    items: opt.Items = None,
    records: opt.Records = None,
    length: opt.Length = None,
    window: opt.Window = None,
    seed: opt.Seed = 0,
    demonstrations: opt.Demonstrations = 0,
    key_tokens: opt.KeyTokens = 1,
    value_tokens: opt.ValueTokens = 1,
    style: opt.Style = "auto",
    margin: opt.Margin = 0.02,
    gguf: opt.Gguf = None,
    json: opt.Json = None,
) -> None:
    """Residues covered, prompts, tokens, detectable amplitude. Asks the model nothing."""
    settings = opt.audit_settings(
        targets, control, probe, stride, items, records, length, window, seed,
        demonstrations, key_tokens, value_tokens, style, margin, gguf,
    )  # fmt: skip
    made = make_plan(settings, opt.opener(gguf), pilot=False)
    opt.write_json(made.model_dump_json(indent=2) + "\n", json)
    console = Console(stderr=json is not None and str(json) == "-")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("target", "probe", "stride", "prompts", "tokens", "detectable amplitude"):
        table.add_column(heading, justify="left" if heading in ("target", "probe") else "right")
    for part in made.parts:
        view = outlook(part)
        amplitude = "-" if view.detectable_amplitude is None else f"{view.detectable_amplitude:.3f}"
        stride_text = f"{part.stride_tokens} ({part.stride_source})" if part.stride_tokens else "scan"
        table.add_row(part.target, part.probe.probe, stride_text, f"{view.prompts:,}", f"{view.tokens:,}", amplitude)
    console.print(table)
    lead = made.parts[0]
    view = outlook(lead)
    periods = ", ".join(f"{period} ({positions})" for period, positions in view.residues.items())
    console.print(f"\nPeriods covered (positions per item): {periods}.", highlight=False)
    console.print(
        f"{lead.probe.items} items x {lead.rows // lead.probe.items} positions, {lead.probe.records} records, "
        f"{lead.probe.length_tokens} tokens. Detectable: half peak to trough found with 90 % power at 80 % accuracy.",
        highlight=False,
    )
    for note in made.notes:
        console.print(note, markup=False, highlight=False)
