"""Requests to the server behind the proxy: no redirects, a deadline on the whole, no names of ours added."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx2

from isophase.mitigate.proxy.headers import Raw, RefusedError
from isophase.mitigate.proxy.settings import ProxySettings

READY_SECONDS = 2.0
_KEPT_SECONDS = 2.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Call(NamedTuple):
    """One request to the server.

    Attributes:
        method: in capitals.
        target: path and query, as they go over the wire.
        headers: see `headers.sent_on`.
        body: whole.
    """

    method: str
    target: bytes
    headers: Raw
    body: bytes


class FaultError(RefusedError):
    """The server failed: what the client is told, and a short name of the fault for logs and metrics."""


class Upstream:
    """Connections to the server, kept between requests.

    Args:
        settings: of the proxy.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._url = httpx2.URL(settings.upstream)
        self._timeout = httpx2.Timeout(settings.timeout_seconds, connect=settings.connect_seconds)
        # A proxy of the environment cannot reach this machine's loopback interface.
        self._trust_env = (urlsplit(settings.upstream).hostname or "") not in _LOOPBACK
        self._context: ssl.SSLContext | None = None
        self._idle: list[httpx2.AsyncClient] = []

    @asynccontextmanager
    async def reply(self, call: Call) -> AsyncIterator[httpx2.Response]:
        """The server's reply, its body still to be read.

        Args:
            call: what it is asked.

        Raises:
            FaultError: no reply, no complete reply in time, or a redirect. Also raised from where the body is read.
        """
        base = self._url.raw_path.rstrip(b"/")
        request = httpx2.Request(
            call.method,
            self._url.copy_with(raw_path=base + call.target),
            headers=call.headers,
            content=call.body,
            extensions={"timeout": self._timeout.as_dict()},
        )
        if not call.body and call.method in ("GET", "HEAD"):
            request.headers.pop("content-length", None)
        # One client for each request in flight: a shared one searches all its connections for every request.
        http = self._idle.pop() if self._idle else self._client()
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                response = await http.send(request, stream=True)
                try:
                    if response.is_redirect:
                        raise FaultError(502, "the server redirects, which is refused: keys never follow.", "redirect")
                    yield response
                finally:
                    await response.aclose()
        except httpx2.ConnectTimeout:
            raise FaultError(504, "the server accepts no connection in time.", "connect_timeout") from None
        except (TimeoutError, httpx2.TimeoutException):
            limit = self._settings.timeout_seconds
            raise FaultError(504, f"no complete reply of the server within {limit:g} s.", "timeout") from None
        except httpx2.ConnectError:
            raise FaultError(502, "the server cannot be reached.", "unreachable") from None
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError):
            # Not the library's words: they may repeat what the server sent.
            raise FaultError(502, "the server broke off, or speaks no HTTP.", "broken") from None
        finally:
            self._idle.append(http)

    async def whole(self, call: Call) -> tuple[int, Raw, bytes]:
        """Status, headers and decoded body.

        Raises:
            FaultError: as from `reply`, or the body is longer than `reply_bytes`.
        """
        async with self.reply(call) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > self._settings.reply_bytes:
                    raise FaultError(502, "the reply of the server is too long for a vote.", "too_long")
            return response.status_code, list(response.headers.raw), bytes(body)

    async def is_ready(self) -> bool:
        """Whether the server answers at all; a refused key is an answer."""
        try:
            async with asyncio.timeout(READY_SECONDS), self.reply(Call("GET", b"/v1/models", [], b"")) as response:
                return response.status_code < 500
        except (FaultError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop().aclose()

    def _client(self) -> httpx2.AsyncClient:
        if self._context is None:
            self._context = httpx2.create_ssl_context(trust_env=self._trust_env)
        # Servers close idle connections after five seconds or more; ours must be gone before that.
        limits = httpx2.Limits(keepalive_expiry=_KEPT_SECONDS)
        return httpx2.AsyncClient(
            verify=self._context, trust_env=self._trust_env, follow_redirects=False, limits=limits
        )
