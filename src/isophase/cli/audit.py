"""`isophase audit`: ask, assess, report."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from isophase.audit import build_report, costs, default_folder, plan_for, run_plan
from isophase.audit.report import overall_verdict, print_report, render_json
from isophase.cli import options as opt
from isophase.errors import EXIT_INCONCLUSIVE, EXIT_NONE, EXIT_SENSITIVE, IsophaseError

_EXIT_CODES = {"sensitive": EXIT_SENSITIVE, "none": EXIT_NONE, "inconclusive": EXIT_INCONCLUSIVE}


def audit(
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
    out: opt.Out = None,
    json: opt.Json = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Audit a planted effect: shows a report in seconds, without torch.")
    ] = False,
) -> None:
    """Does accuracy depend on where a fact falls inside a compression chunk?

    Without a target, audits the bundled compressed models beside their full-attention twin.
    Exit codes: 0 no sensitivity above the margin, 10 sensitive, 11 inconclusive, 2 usage,
    3 server unreachable.
    """
    if demo:
        if targets:
            raise IsophaseError(f"--demo brings its own target, and {targets[0]!r} is given.", "Leave one of them out.")
        targets, stride = ["planted:period=8,amplitude=.15,accuracy=.75,noise=.1,trend=.2"], "scan"
        control = "planted:amplitude=0,accuracy=.75,noise=.1,trend=.2"
    settings = opt.audit_settings(
        opt.with_variants(targets, cache, vote, prefill), control, probe, stride, items, records, length, window, seed,
        demonstrations, key_tokens, value_tokens, style, margin, gguf, server, tokenizer,
    )  # fmt: skip
    open_target = opt.opener(gguf, opt.server_options(server, tokenizer, concurrency, timeout))
    folder = out or default_folder(settings, open_target)
    plan = plan_for(settings, folder, open_target)
    progress = Console(stderr=True)
    for line in costs(plan, open_target):
        progress.print(line, markup=False, soft_wrap=True, highlight=False)
    run_plan(plan, folder, open_target, progress)
    result = build_report(folder, lambda spec: open_target(spec).tokenizer)
    html = opt.save_report(result, folder)
    opt.write_json(render_json(result), json)
    console = opt.console_for_people(json)
    print_report(result, console)
    console.print(f"\nReport: {html}", soft_wrap=True, markup=False)
    raise typer.Exit(_EXIT_CODES[overall_verdict(result)])
