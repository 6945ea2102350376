"""What comes in from a client: the target of a request, its body, and the moment it hangs up."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import unquote

from starlette.types import Receive, Scope

from isophase.mitigate.proxy.headers import Raw, RefusedError

_TARGET = re.compile(rb"/v1(/[A-Za-z0-9._~:@%+-]+)+")
_QUERY = re.compile(rb"[!-~]*")
_BODY_SECONDS = 60.0
"""Longest time that a client may take to send its body."""


def target_of(scope: Scope) -> bytes:
    """Path and query of a request as they go to the server.

    Raises:
        RefusedError: the path leaves `/v1`, now or after another round of decoding.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    raw = raw.split(b"?")[0]
    query: bytes = scope.get("query_string", b"")
    parts = unquote(raw.decode("ascii", "replace")).split("/")
    strange = any(
        part in ("", ".", "..") or not part.isprintable() or "\\" in part or "%" in part for part in parts[1:]
    )
    if not _TARGET.fullmatch(raw) or strange or not _QUERY.fullmatch(query):
        raise RefusedError(404, "there is no such path below /v1.", "not_found")
    return raw + b"?" + query if query else raw


def check_framing(headers: Raw) -> None:
    """Refuse requests whose end two servers may see at different places.

    Raises:
        RefusedError: two lengths, a length beside a transfer coding, or a coding other than chunked.
    """
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    wrong_length = len(lengths) > 1 or any(not value.isdigit() for value in lengths)
    if wrong_length or (codings and (lengths or codings != [b"chunked"])):
        raise RefusedError(400, "the length of the body is ambiguous.", "bad_framing", [(b"connection", b"close")])


async def read_body(headers: Raw, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RefusedError: it is too long, or too slow.
        ConnectionError: the client went away.
    """
    too_long = RefusedError(
        413, f"the body is longer than {limit_bytes:,} bytes.", "body_too_long", [(b"connection", b"close")]
    )
    if any(name == b"content-length" and int(value) > limit_bytes for name, value in headers):
        raise too_long
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client went away")
                part = message.get("body", b"")
                size += len(part)
                if size > limit_bytes:
                    raise too_long
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RefusedError(
            408, f"the body did not come within {_BODY_SECONDS:g} s.", "body_too_slow", [(b"connection", b"close")]
        ) from None


async def hang_up(receive: Receive) -> None:
    """Returns when the client has gone; to be awaited once the body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass
