"""`isophase plan`: what an audit would ask, and what it could find."""

from __future__ import annotations

from rich.table import Table

from isophase.audit import make_plan, needs_pilot, outlook
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
    demonstrations: opt.Demonstrations = None,
    key_tokens: opt.KeyTokens = 1,
    value_tokens: opt.ValueTokens = 1,
    style: opt.Style = "auto",
    margin: opt.Margin = 0.02,
    gguf: opt.Gguf = None,
    cache: opt.Cache = None,
    vote: opt.Vote = None,
    prefill: opt.Prefill = None,
    server: opt.Server = "auto",
    tokenizer: opt.TokenizerOption = None,
    concurrency: opt.Concurrency = 16,
    timeout: opt.Timeout = 600.0,
    json: opt.Json = None,
) -> None:
    """Residues covered, prompts, tokens, detectable amplitude. Asks the model nothing."""
    settings = opt.audit_settings(
        opt.with_variants(targets, cache, vote, prefill), control, probe, stride, items, records, length, window, seed,
        demonstrations, key_tokens, value_tokens, style, margin, gguf, server, tokenizer,
    )  # fmt: skip
    open_target = opt.opener(gguf, opt.server_options(server, tokenizer, concurrency, timeout))
    made = make_plan(settings, open_target, pilot=False)
    opt.write_json(made.model_dump_json(indent=2) + "\n", json)
    console = opt.console_for_people(json)
    views = [outlook(part, open_target(part.target).tokenizer) for part in made.parts]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("target", "probe", "stride", "prompts", "tokens", "detectable amplitude"):
        table.add_column(heading, justify="left" if heading in ("target", "probe") else "right")
    for part, view in zip(made.parts, views, strict=True):
        told = f"{part.stride_tokens} ({part.stride_source})" if part.stride_tokens else "scan"
        table.add_row(
            part.target,
            part.probe.probe,
            told,
            f"{view.prompts:,}",
            f"{view.tokens:,}",
            f"{view.detectable_amplitude:.3f}",
        )
    console.print(table)
    lead, view = made.parts[0], views[0]
    periods = ", ".join(f"{period} ({positions})" for period, positions in view.residues.items())
    made_of = "" if lead.probe.probe == "completion" else f", {lead.probe.records} records each"
    console.print(
        f"\n{lead.probe.probe}: {view.items} items x {view.window_tokens} positions, "
        f"{view.length_tokens:,} tokens{made_of}.\n"
        f"Periods tested (positions per item that cover every residue equally often): {periods}.\n"
        "Detectable amplitude: half peak to trough found with 90 % power at 80 % accuracy."
    )
    if needs_pilot(settings, open_target):
        console.print("No --records given: the audit asks a few questions first to pick a number of records.")
    for note in made.notes:
        console.print(note, markup=False)
