"""Run the proxy until it is told to stop."""

from __future__ import annotations

import signal
import socket
import sys

import uvicorn
from starlette.applications import Starlette

from isophase.errors import IsophaseError
from isophase.mitigate.proxy.app import create_app
from isophase.mitigate.proxy.settings import ProxySettings
from isophase.mitigate.proxy.watch import log_to, say

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is a fault before anything has started.

    Raises:
        IsophaseError: it cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise IsophaseError(
            f"cannot listen on {host}:{port}: {error.strerror or error}.", "Choose another --listen."
        ) from None


def server_config(app: Starlette, grace_seconds: int) -> uvicorn.Config:
    """How the proxy is served: nothing added to replies, no log of requests but its own."""
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=grace_seconds,
    )


def run_proxy(settings: ProxySettings, host: str, port: int, *, grace_seconds: int = 30) -> None:
    """Serve until SIGINT or SIGTERM; requests in flight are finished first.

    Args:
        settings: of the proxy.
        host: address or name to listen on.
        port: 0 lets the system choose; the log names it.
        grace_seconds: time that requests in flight get at the end.

    Raises:
        IsophaseError: a setting that cannot work, or an address that cannot be listened on.
    """
    app = create_app(settings)
    place = listen(host, port)
    log_to(sys.stderr)
    server = uvicorn.Server(server_config(app, grace_seconds))
    port = place.getsockname()[1]
    say("listening", host=host, port=port, upstream=settings.upstream, policy=settings.policy, shifts=settings.shifts)
    # uvicorn stops in good order and then raises the signal again, which would end the process before its last word.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[place])
    except KeyboardInterrupt:
        pass
    finally:
        place.close()
        say("stopped")
