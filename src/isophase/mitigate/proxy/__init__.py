"""An OpenAI-compatible proxy that protects any client: starlette, uvicorn and httpx2, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.mitigate.proxy.serve import run_proxy
    from isophase.mitigate.proxy.settings import PLACES, POLICIES, ProxySettings, choice, parse_address

__all__ = ["PLACES", "POLICIES", "ProxySettings", "choice", "parse_address", "run_proxy"]

__getattr__, __dir__ = lazily(__name__, __file__)
