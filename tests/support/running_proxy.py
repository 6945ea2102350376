"""The proxy on a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import uvicorn

from isophase.mitigate.proxy.app import create_app
from isophase.mitigate.proxy.serve import listen, server_config
from isophase.mitigate.proxy.settings import ProxySettings


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return when it holds; fails if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class RunningProxy:
    """Serves until the block ends.

    Args:
        upstream: URL of the server behind it.
        settings: of the proxy, besides.
    """

    def __init__(self, upstream: str, **settings: object) -> None:
        given = {"timeout_seconds": 10.0, "strides_tokens": (4,), **settings}
        self.app = create_app(ProxySettings(upstream=upstream, **given))

    def __enter__(self) -> RunningProxy:
        self._socket = listen("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self._server = uvicorn.Server(server_config(self.app, grace_seconds=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"
