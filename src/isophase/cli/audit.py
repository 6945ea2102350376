"""`isophase audit`: ask, assess, report."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import typer
from rich.console import Console

from isophase.audit.analyse import build_report
from isophase.audit.plan import make_plan
from isophase.audit.report import overall_verdict, print_report, render_json, write_report
from isophase.audit.run import run_plan
from isophase.audit.settings import Plan
from isophase.cli import options as opt
from isophase.errors import EXIT_INCONCLUSIVE, EXIT_NONE, EXIT_SENSITIVE

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
    demonstrations: opt.Demonstrations = 0,
    key_tokens: opt.KeyTokens = 1,
    value_tokens: opt.ValueTokens = 1,
    style: opt.Style = "auto",
    margin: opt.Margin = 0.02,
    gguf: opt.Gguf = None,
    out: opt.Out = None,
    json: opt.Json = None,
    demo: bool = typer.Option(False, "--demo", help="Audit a planted effect: shows a report in seconds, without torch."),
) -> None:
    """Does accuracy depend on where a fact falls inside a compression chunk?

    Without a target, audits the bundled compressed models beside their full-attention twin.
    Exit codes: 0 no sensitivity above the margin, 10 sensitive, 11 inconclusive, 2 usage, 3 unreachable.
    """
    if demo:
        targets, stride = ["planted:period=8,amplitude=.15,accuracy=.75,noise=.1,trend=.2"], "scan"
        control = "planted:amplitude=0,accuracy=.75,noise=.1,trend=.2"
    settings = opt.audit_settings(
        targets, control, probe, stride, items, records, length, window, seed,
        demonstrations, key_tokens, value_tokens, style, margin, gguf,
    )  # fmt: skip
    open_target = opt.opener(gguf)
    # With the JSON on standard output, everything for people goes to standard error.
    console = Console(stderr=json is not None and str(json) == "-")
    plan = make_plan(settings, open_target, pilot=True)
    folder = out or default_folder(plan)
    run_plan(plan, folder, open_target, Console(stderr=True))
    result = build_report(folder, lambda spec: open_target(spec).tokenizer)
    html = write_report(result, folder)
    print_report(result, console)
    console.print(f"\nReport: {html}", soft_wrap=True, markup=False, highlight=False)
    opt.write_json(render_json(result), json)
    raise typer.Exit(_EXIT_CODES[overall_verdict(result)])


def default_folder(plan: Plan) -> Path:
    """The run folder of a plan: equal plans resume each other, others never meet."""
    lead = plan.parts[0]
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in lead.target.split("/")[-1])[:40]
    digest = sha256(plan.model_dump_json().encode()).hexdigest()[:8]
    return Path("isophase-runs") / f"{name}-{digest}"
