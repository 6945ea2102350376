"""What the proxy was told: where the model is, what to do with requests, and the limits."""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from isophase.errors import IsophaseError
from isophase.mitigate.vote.rules import Rule
from isophase.mitigate.vote.shifts import DEFAULT_UNIT, choose_shifts

Policy = Literal["vote", "align", "off"]
POLICIES: tuple[str, ...] = get_args(Policy)
Place = Literal["first-user", "last-user", "system"]
PLACES: tuple[str, ...] = get_args(Place)


class ProxySettings(BaseModel):
    """Settings of one proxy.

    Attributes:
        upstream: root of the server that answers, such as `http://localhost:8000`, without `/v1`.
        policy: of requests that name none.
        shifts: requests that a vote asks, the unshifted one included.
        most_shifts: largest number that a request may ask for.
        strides_tokens: strides of the model.
        rule: how answers are combined.
        place: where neutral tokens go: before the first user message, behind the system prompt that requests
            share; before the last one; or before everything.
        unit: neutral text of one token.
        tokenizer: file, folder or hub id of the model's tokenizer; None: `unit` is believed.
        phase_accuracy: accuracy by phase for alignment; empty: only boundaries matter, of the smallest stride.
        body_bytes: largest request.
        reply_bytes: largest reply that takes part in a vote.
        timeout_seconds: longest time of one request, its reply included.
        connect_seconds: longest time until the server accepts a connection.
        concurrency: most requests to the server in flight; a vote over 8 shifts is 8.
        cost_tokens: most tokens that one vote may read and write, all shifts together.
        log_text: whether answers that disagree are logged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: str
    policy: Policy = "vote"
    shifts: int = 4
    most_shifts: int = 16
    strides_tokens: tuple[int, ...] = (4, 128)
    rule: Rule = "majority"
    place: Place = "first-user"
    unit: str = DEFAULT_UNIT
    tokenizer: str | None = None
    phase_accuracy: tuple[float, ...] = ()
    body_bytes: int = 8 << 20
    reply_bytes: int = 16 << 20
    timeout_seconds: float = 600.0
    connect_seconds: float = 10.0
    concurrency: int = 256
    cost_tokens: int = 2_000_000
    log_text: bool = False


def checked(settings: ProxySettings) -> ProxySettings:
    """The settings, with the URL of the server in its plain form.

    Raises:
        IsophaseError: a setting that cannot work.
    """
    choose_shifts(settings.strides_tokens, settings.shifts)
    limits = {
        "--most-shifts": (settings.most_shifts, settings.shifts),
        "--concurrency": (settings.concurrency, settings.most_shifts),
        "--body-limit": (settings.body_bytes, 1),
        "--cost-limit": (settings.cost_tokens, 1),
    }
    for name, (value, least) in limits.items():
        if value < least:
            raise IsophaseError(f"{name} is {value:,}; it must be at least {least:,}.", f"Give {least:,} or more.")
    if not settings.timeout_seconds > 0:
        raise IsophaseError(
            f"--timeout is {settings.timeout_seconds:g} seconds; it must be above 0.", "Give 1 or more."
        )
    if settings.policy == "align" and not settings.tokenizer:
        raise IsophaseError("--policy align counts tokens, and no tokenizer is given.", "Give --tokenizer.")
    if not settings.unit or not settings.unit.isprintable():
        raise IsophaseError(f"--unit is {settings.unit!r}.", "Give printable text of one token, such as ' .'.")
    return settings.model_copy(update={"upstream": _root(settings.upstream)})


def choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    """`value` if it is one of the choices.

    Raises:
        IsophaseError: it is not.
    """
    if value not in choices:
        raise IsophaseError(f"{option} {value!r} is unknown.", f"Give {', '.join(choices)}.")
    return value


def parse_address(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` (an IPv6 host in brackets); port 0 lets the system choose.

    Raises:
        IsophaseError: it is none.
    """
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None or parts.netloc != listen or parts.username is not None:
        raise IsophaseError(f"--listen is {listen!r}.", "Give HOST:PORT, such as 127.0.0.1:8080.")
    return host, port


def _root(url: str) -> str:
    remedy = "Give --upstream http://HOST:PORT/v1."
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise IsophaseError(f"--upstream {url!r} is no URL: {error}.", remedy) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise IsophaseError(f"--upstream {url!r} is no http or https URL.", remedy)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise IsophaseError(
            "--upstream holds a user, a password, a query or a fragment.",
            "Keys belong into the clients' authorization header, which is passed on.",
        )
    if any(character.isspace() or not character.isprintable() for character in url):
        raise IsophaseError(f"--upstream {url!r} holds white space or control characters.", remedy)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
