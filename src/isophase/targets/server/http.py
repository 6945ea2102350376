"""JSON over HTTP to one server: bounded replies, deadlines, retries that spare the server, no secrets in messages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import stamina

from isophase import __version__
from isophase.errors import IsophaseError

T = TypeVar("T")

KEY_VARIABLE = "ISOPHASE_API_KEY"
# The key of one company's service must not reach any other host.
_OPENAI_VARIABLE, _OPENAI_HOST = "OPENAI_API_KEY", "api.openai.com"

CONNECT_SECONDS = 10.0
ATTEMPTS = 6
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, JITTER_SECONDS = 0.5, 20.0, 1.0
# A server that asks for a longer pause is better asked in another run.
LONGEST_RETRY_AFTER_SECONDS = 600.0
_MOST_REPLY_BYTES = 16 << 20
_SHOWN_CHARACTERS = 200

# stamina announces every retry; without this the announcement lands in the middle of a progress bar.
logging.getLogger("stamina").addHandler(logging.NullHandler())


class RequestFailedError(Exception):
    """A request that brought no usable reply.

    Args:
        reason: in words, without secrets.
        status: HTTP status, None where there was no reply.
        retry: whether another attempt may succeed.
        retry_after_seconds: pause that the server asked for.
    """

    def __init__(
        self, reason: str, *, status: int | None = None, retry: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.retry = retry
        self.retry_after_seconds = retry_after_seconds

    @property
    def no_reply(self) -> bool:
        """Whether the network or the server itself failed, rather than this one request."""
        return self.retry and (self.status is None or self.status >= 500)


class ServerClient:
    """Talks to one server, on an event loop of its own that runs only while it is asked something.

    Args:
        base_url: such as `http://localhost:8000/v1`; no user, password or query in it.
        timeout_seconds: longest time that one request may take, all of its reply included.

    Raises:
        IsophaseError: for a URL that is none, or one that holds a secret.
    """

    def __init__(self, base_url: str, *, timeout_seconds: float) -> None:
        parts = _checked(base_url)
        self.base_url = base_url.rstrip("/")
        self.root_url = self.base_url.removesuffix("/v1")
        self.timeout_seconds = timeout_seconds
        self._host = parts.hostname or ""
        self._key = os.environ.get(KEY_VARIABLE) or (
            os.environ.get(_OPENAI_VARIABLE) if self._host == _OPENAI_HOST and parts.scheme == "https" else None
        )
        self._runner = asyncio.Runner()
        self._context: ssl.SSLContext | None = None
        self._urls: dict[str, httpx2.URL] = {}
        self._idle: list[httpx2.AsyncClient] = []
        self._clients: list[httpx2.AsyncClient] = []

    @property
    def has_key(self) -> bool:
        """Whether requests carry a key."""
        return bool(self._key)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that requests belong to."""
        return self._runner.get_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine to its end."""
        return self.loop().run_until_complete(work)

    async def get(self, url: str, *, attempts: int | None = None) -> dict[str, Any]:
        """JSON object at `url` (below `base_url`, or absolute)."""
        return await self._with_retries("GET", url, None, attempts)

    async def post(self, url: str, body: dict[str, Any], *, attempts: int | None = None) -> dict[str, Any]:
        """Reply to `body`, a JSON object.

        Raises:
            RequestFailedError: after the last attempt.
        """
        return await self._with_retries("POST", url, body, attempts)

    def post_now(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Reply to a small question, asked once, whether or not the event loop is running.

        Raises:
            RequestFailedError: there is no usable reply.
        """
        limits = httpx2.Timeout(self.timeout_seconds, connect=CONNECT_SECONDS)
        with self._faults(), httpx2.Client(**self._settings()) as http:
            response = http.post(url, json=body, timeout=limits)
        self._refuse(response.status_code, response.headers, response.content)
        reply = response.json() if "json" in response.headers.get("content-type", "") else None
        if not isinstance(reply, dict):
            raise RequestFailedError("the reply is no JSON object", status=response.status_code)
        return reply

    async def text(self, url: str) -> str:
        """Body of `url` whatever its type, asked once."""
        with self._faults():
            async with asyncio.timeout(self.timeout_seconds):
                return (await self._request("GET", url, None))[1].decode(errors="replace")

    async def _with_retries(
        self, method: str, url: str, body: dict[str, Any] | None, attempts: int | None
    ) -> dict[str, Any]:
        async for attempt in stamina.retry_context(
            on=_backoff,
            attempts=attempts or ATTEMPTS,
            timeout=None,
            wait_initial=FIRST_WAIT_SECONDS,
            wait_max=LONGEST_WAIT_SECONDS,
            wait_jitter=JITTER_SECONDS,
        ):
            with attempt:
                return await self._once(method, url, body)
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._faults():
            # httpx limits the pause between two bytes; a slow drip needs a limit on the whole.
            async with asyncio.timeout(self.timeout_seconds):
                content_type, raw = await self._request(method, url, body)
        if "json" not in content_type:
            raise RequestFailedError(f"the reply is {content_type or 'of no type'}, not JSON", status=200, retry=True)
        try:
            reply = json.loads(raw)
        except ValueError:
            raise RequestFailedError(
                f"the reply is not JSON ({len(raw)} bytes, cut off?)", status=200, retry=True
            ) from None
        if not isinstance(reply, dict):
            raise RequestFailedError("the reply is JSON, but no object", status=200)
        return reply

    async def _request(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[str, bytes]:
        """One attempt: content type and body of a reply with status 2xx."""
        http = self._idle.pop() if self._idle else self._open()
        try:
            response = await http.send(self._build(http, method, url, body), stream=True)
            try:
                raw = bytearray()
                _check_size(int(response.headers.get("content-length", "0")), response.status_code)
                async for chunk in response.aiter_bytes():
                    raw += chunk
                    _check_size(len(raw), response.status_code)
            finally:
                await response.aclose()
        finally:
            self._idle.append(http)
        self._refuse(response.status_code, response.headers, bytes(raw))
        return response.headers.get("content-type", "").split(";")[0].strip().lower(), bytes(raw)

    def _build(self, http: httpx2.AsyncClient, method: str, url: str, body: dict[str, Any] | None) -> httpx2.Request:
        """A request like those of `http.request`, for which URL and headers are not parsed and merged every time."""
        if url not in self._urls:
            self._urls[url] = httpx2.URL(url if url.startswith(("http://", "https://")) else self.base_url + url)
        return httpx2.Request(
            method,
            self._urls[url],
            headers=[*http.headers.raw, (b"content-type", b"application/json")],
            content=None if body is None else json.dumps(body, separators=(",", ":")).encode(),
            extensions={"timeout": http.timeout.as_dict()},
        )

    def _refuse(self, status: int, headers: httpx2.Headers, raw: bytes) -> None:
        """Raise for a reply that is no success."""
        if 300 <= status < 400:
            host = urlsplit(headers.get("location", "")).hostname or "another path"
            raise RequestFailedError(
                self._safe(f"the server redirects to {host}, which is refused: keys never follow"), status=status
            )
        if status >= 400:
            raise RequestFailedError(
                self._safe(f"HTTP {status}: {_message(raw) or 'no reason given'}"),
                status=status,
                retry=status == 429 or status >= 500,
                retry_after_seconds=_retry_after(headers.get("retry-after")),
            )

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what the network may do into one kind of failure."""
        try:
            yield
        except (TimeoutError, httpx2.TimeoutException) as error:
            limit = CONNECT_SECONDS if isinstance(error, httpx2.ConnectTimeout) else self.timeout_seconds
            raise RequestFailedError(f"no complete reply within {limit:g} s", retry=True) from None
        except httpx2.TransportError as error:
            text = str(error) or type(error).__name__
            if isinstance(error.__cause__, ssl.SSLError) or "SSL" in text:
                # Another attempt meets the same certificate.
                raise RequestFailedError(self._safe(f"no secure connection: {text}")) from None
            raise RequestFailedError(self._safe(f"the connection failed: {text}"), retry=True) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise RequestFailedError(self._safe(f"the reply cannot be read: {error}")) from None

    def _open(self) -> httpx2.AsyncClient:
        """A client for one request at a time; the one used last is used next, so that few connections stay warm.

        One client for all would look through all of its connections for each request, which at 32 in flight
        costs more than the request itself.
        """
        http = httpx2.AsyncClient(**self._settings())
        self._clients.append(http)
        return http

    def _settings(self) -> dict[str, Any]:
        """What every client of this server has in common."""
        headers = {"user-agent": f"isophase/{__version__}", "accept": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        # A proxy cannot reach this machine's loopback interface.
        trust_env = self._host not in ("localhost", "127.0.0.1", "::1")
        if self._context is None:
            self._context = httpx2.create_ssl_context(trust_env=trust_env)
        return {
            "headers": headers,
            "follow_redirects": False,
            # Each request has a limit on the whole; timers for every read and write would cost more than they give.
            "timeout": httpx2.Timeout(None, connect=CONNECT_SECONDS),
            "verify": self._context,
            "trust_env": trust_env,
        }

    def _safe(self, text: str) -> str:
        """Text of a server that may repeat the key that it refuses."""
        short = " ".join(text.split())
        if self._key:
            short = short.replace(self._key, "[key]")
        return short if len(short) <= _SHOWN_CHARACTERS else short[:_SHOWN_CHARACTERS] + "..."

    def close(self) -> None:
        """Close the connections; the next question opens new ones. Does nothing inside a running event loop."""
        if asyncio._get_running_loop() is not None:  # collected while another client works
            return
        clients, self._clients, self._idle = self._clients, [], []
        for http in clients:
            self.run(http.aclose())


def _checked(base_url: str) -> Any:
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise IsophaseError(
            f"server URL {base_url!r} is not one: {error}.", "Write http://HOST:PORT/v1#MODEL."
        ) from None
    if parts.username or parts.password or parts.query:
        raise IsophaseError(
            "the server URL holds a user, a password or a query, which would end up in files.",
            f"Write http://HOST:PORT/v1#MODEL and put the key into {KEY_VARIABLE}.",
        )
    if not parts.hostname or port == 0:
        raise IsophaseError(f"server URL {base_url!r} names no host.", "Write http://HOST:PORT/v1#MODEL.")
    return parts


def _check_size(size_bytes: int, status: int) -> None:
    """Raise for a reply that is too long, by what it says or by what has come."""
    if size_bytes > _MOST_REPLY_BYTES:
        raise RequestFailedError(f"the reply is longer than {_MOST_REPLY_BYTES >> 20} MiB", status=status)


def _backoff(error: Exception) -> bool | float:
    """Stamina's question: try again, and after how many seconds (True: exponential with jitter)."""
    if not isinstance(error, RequestFailedError) or not error.retry:
        return False
    wanted = error.retry_after_seconds
    if wanted is None:
        return True
    if wanted > LONGEST_RETRY_AFTER_SECONDS:
        return False
    # Never earlier than asked; later by chance, so that requests do not come back all at once.
    return wanted + random.uniform(0, JITTER_SECONDS)  # no result depends on it


def _retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except (TypeError, ValueError):
        return None


def _message(raw: bytes) -> str:
    """What a server says about an error: the usual fields, else the start of the body."""
    try:
        found: Any = json.loads(raw)
    except ValueError:
        return raw[:_SHOWN_CHARACTERS].decode(errors="replace")
    for _ in range(3):
        if not isinstance(found, dict):
            break
        found = next((found[name] for name in ("error", "message", "detail") if name in found), "")
    return found if isinstance(found, str) else json.dumps(found)[:_SHOWN_CHARACTERS]
