"""Which headers pass the proxy, in both directions, and what clients may tell it in theirs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from isophase.mitigate.proxy.settings import POLICIES, Policy, ProxySettings
from isophase.mitigate.vote.rules import RULES, Rule

Raw = list[tuple[bytes, bytes]]

OURS = b"x-isophase-"
POLICY, SHIFTS, RULE = b"x-isophase-policy", b"x-isophase-shifts", b"x-isophase-rule"

# RFC 9110, 7.6.1, and what older clients send; they belong to one connection only.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# The proxy reads the whole body, so it says its own length; it has answered `expect` itself.
_NOT_SENT_ON = frozenset({b"host", b"content-length", b"expect"})


class RefusedError(Exception):
    """A request that is answered by the proxy itself, with an error.

    Args:
        status: HTTP status.
        message: for the client; nothing of the request's text, no key.
        code: for programs.
        headers: besides the usual.
    """

    def __init__(self, status: int, message: str, code: str, headers: Raw | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or []

    @property
    def body(self) -> bytes:
        """In the form of OpenAI's errors, which its clients read."""
        error = {"message": self.message, "type": "isophase_proxy", "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


class Overrides(NamedTuple):
    """What one request wants."""

    policy: Policy
    shifts: int
    rule: Rule


def overrides(headers: Iterable[tuple[bytes, bytes]], settings: ProxySettings) -> Overrides:
    """Read the headers that choose policy, shifts and rule.

    Args:
        headers: of the request, names in lower case.
        settings: what holds where a header is missing.

    Raises:
        RefusedError: a value is none of its choices, or a header is there twice.
    """
    found: dict[bytes, str] = {}
    for name, value in headers:
        if name in (POLICY, SHIFTS, RULE):
            if name in found:
                raise RefusedError(400, f"the header {name.decode()} is there twice.", "bad_header")
            found[name] = value.decode("latin-1").strip()
    policy = found.get(POLICY, settings.policy)
    if policy not in POLICIES:
        raise RefusedError(400, f"{POLICY.decode()} is none of {', '.join(POLICIES)}.", "bad_header")
    rule = found.get(RULE, settings.rule)
    if rule not in RULES:
        raise RefusedError(400, f"{RULE.decode()} is none of {', '.join(RULES)}.", "bad_header")
    shifts = found.get(SHIFTS, str(settings.shifts))
    known = shifts.isascii() and shifts.isdecimal() and len(shifts) < 6
    if not known or not 1 <= int(shifts) <= settings.most_shifts:
        raise RefusedError(400, f"{SHIFTS.decode()} is no number of 1 to {settings.most_shifts}.", "bad_header")
    return Overrides(cast(Policy, policy), int(shifts), cast(Rule, rule))


def sent_on(headers: Iterable[tuple[bytes, bytes]]) -> Raw:
    """Headers of a request that the server gets too."""
    return _without(headers, _NOT_SENT_ON)


def handed_back(headers: Iterable[tuple[bytes, bytes]], *, same_body: bool = True) -> Raw:
    """Headers of a reply that the client gets too.

    Args:
        headers: of the server's reply.
        same_body: whether its body is passed on byte by byte; else length and encoding are left out.
    """
    dropped = frozenset() if same_body else frozenset({b"content-length", b"content-encoding", b"etag", b"digest"})
    return _without(headers, dropped)


def header_value(text: str) -> bytes:
    """Text as the value of a header: one line of ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode()


def as_json(value: Any) -> bytes:
    """Compact JSON; lone surrogates stay escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _without(headers: Iterable[tuple[bytes, bytes]], more: frozenset[bytes]) -> Raw:
    pairs = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",") if token
    }
    dropped = _HOP_BY_HOP | named | more
    return [(name, value) for name, value in pairs if name not in dropped and not name.startswith(OURS)]
