"""`isophase serve`: a proxy in front of a model that is already deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isophase.errors import IsophaseError
from isophase.mitigate.vote import DEFAULT_UNIT, RULES


def serve(
    upstream: Annotated[str, typer.Option(help="Server that answers: http://HOST:PORT/v1.", show_default=False)],
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:8080",
    policy: Annotated[str, typer.Option(help="vote, align or off; a request may choose by header.")] = "vote",
    shifts: Annotated[int, typer.Option(help="Requests that a vote asks, the unshifted one included.")] = 4,
    stride: Annotated[
        list[int] | None, typer.Option(help="Stride of the model in tokens; repeat it. Default: 4 and 128.")
    ] = None,
    rule: Annotated[str, typer.Option(help=f"How answers are combined: {', '.join(RULES)}.")] = "majority",
    insert: Annotated[
        str, typer.Option(help="Where neutral tokens go: first-user (behind the system prompt), last-user or system.")
    ] = "first-user",
    unit: Annotated[str, typer.Option(help="Neutral text of one token, repeated for a shift.")] = DEFAULT_UNIT,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The model's tokenizer: tokenizer.json, a folder with one, or a hub id. For policy align."),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Audit folder whose accuracy by phase policy align goes by.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take, its reply included.")] = 600.0,
    concurrency: Annotated[int, typer.Option(help="Most requests to the server in flight; a vote is several.")] = 256,
    most_shifts: Annotated[int, typer.Option(help="Most shifts that a request may ask for.")] = 16,
    body_limit: Annotated[int, typer.Option(help="Largest request in bytes.")] = 8 << 20,
    cost_limit: Annotated[
        int, typer.Option(help="Most tokens of one vote, all shifts together; above it the request is not voted on.")
    ] = 2_000_000,
    grace: Annotated[int, typer.Option(help="Seconds that requests in flight get at the end.", min=0)] = 30,
    log_text: Annotated[
        bool, typer.Option("--log-text", help="Log answers that disagree. Without it no text is logged.")
    ] = False,
) -> None:
    """Protect any client of an OpenAI-compatible server: vote over shifts, align, or pass on.

    Clients change one URL. A vote asks the request at several shifts of neutral tokens and answers with what most
    of them say; the header x-isophase-agreement tells how many agreed. Exit codes: 0 stopped, 2 usage.
    """
    try:
        from isophase.mitigate.proxy import run_proxy
    except ImportError as error:
        raise IsophaseError(
            f"isophase serve needs {error.name}, which is not installed.",
            "Install it with: pip install 'isophase[serve]'.",
        ) from error
    from isophase.mitigate.align import read_curve
    from isophase.mitigate.proxy import PLACES, POLICIES, ProxySettings, choice, parse_address

    host, port = parse_address(listen)
    accuracy = read_curve(curve) if curve else ()
    settings = ProxySettings.model_validate(
        {
            "upstream": upstream,
            "policy": choice("--policy", policy, POLICIES),
            "shifts": shifts,
            "most_shifts": max(shifts, most_shifts),
            "strides_tokens": tuple(stride or (4, 128)),
            "rule": choice("--rule", rule, RULES),
            "place": choice("--insert", insert, PLACES),
            "unit": unit,
            "tokenizer": tokenizer,
            "phase_accuracy": accuracy,
            "body_bytes": body_limit,
            "timeout_seconds": timeout,
            "concurrency": concurrency,
            "cost_tokens": cost_limit,
            "log_text": log_text,
        }
    )
    run_proxy(settings, host, port, grace_seconds=grace)
