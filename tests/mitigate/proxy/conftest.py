"""A stub server and a proxy in front of it, both over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx2
import pytest

pytest.importorskip("starlette")

from running_proxy import RunningProxy
from stub_upstream import StubUpstream


@pytest.fixture
def stub() -> Iterator[StubUpstream]:
    with StubUpstream() as server:
        yield server


@pytest.fixture
def proxy(stub: StubUpstream) -> Iterator[Callable[..., RunningProxy]]:
    """`proxy(**settings)`: a running proxy in front of the stub."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(RunningProxy(stub.url, **settings))


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=20, trust_env=False) as client:
        yield client


def chat(model: str = "weak", text: str = "What is the code?", **more: object) -> dict:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return {"model": model, "messages": messages, **more}


@pytest.fixture
def ask() -> Callable[..., dict]:
    """The body of a chat request."""
    return chat
