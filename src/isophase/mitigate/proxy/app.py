"""The proxy as an ASGI application: `/v1`, health, metrics, and its own description."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isophase import __version__
from isophase.mitigate.align.text import LocatingTokenizer
from isophase.mitigate.proxy.exchange import Exchange
from isophase.mitigate.proxy.headers import RefusedError
from isophase.mitigate.proxy.settings import ProxySettings, checked
from isophase.mitigate.proxy.upstream import Upstream
from isophase.mitigate.proxy.watch import Metrics

_READY_KEPT_SECONDS = 1.0


@cache
def description() -> dict[str, Any]:
    """The OpenAPI description of the proxy."""
    text = Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8")
    described: dict[str, Any] = yaml.safe_load(text)
    described["info"]["version"] = __version__
    return described


def create_app(settings: ProxySettings) -> Starlette:
    """The application; it holds its connections and metrics, so one app is one proxy.

    Args:
        settings: of the proxy.

    Raises:
        IsophaseError: a setting that cannot work, or no such tokenizer.
    """
    settings = checked(settings)
    tokenizer = LocatingTokenizer(settings.tokenizer) if settings.tokenizer else None
    upstream, metrics = Upstream(settings), Metrics()
    ready: dict[str, float | bool] = {"at": float("-inf"), "is": False}

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        # A prober in a hurry must not become load for the server.
        if time.monotonic() - ready["at"] > _READY_KEPT_SECONDS:
            ready.update({"at": time.monotonic(), "is": await upstream.is_ready()})
        if ready["is"]:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the server does not answer"}, status_code=503)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    async def openapi(_: Request) -> Response:
        return JSONResponse(description())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await upstream.close()

    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", show_metrics),
            Route("/openapi.json", openapi),
            Route("/v1/{path:path}", Exchange(settings, upstream, metrics, tokenizer)),
        ],
        exception_handlers={HTTPException: _refuse},
        lifespan=lifespan,
    )
    # It would redirect to whatever host the request names.
    app.router.redirect_slashes = False
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    refusal = RefusedError(error.status_code, "this is no path of the proxy, or no method of it.", code)
    return Response(refusal.body, error.status_code, headers=error.headers, media_type="application/json")
