"""The page in a real browser, on a phone and on a desk, by day and by night.

Chromium is steered through its debugging pipe: messages are JSON that end with a zero byte, written
to its file descriptor 3 and read from 4. That needs nothing beyond the standard library.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isophase.audit.report import render_html
from isophase.audit.schema import Report

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)
PATIENCE_SECONDS = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
]


class Browser:
    """A page in headless Chromium."""

    def __init__(self, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # the shell puts our pipe ends on the two descriptors that Chromium expects
        command = f'exec "$0" {FLAGS} --user-data-dir="$1" about:blank 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), str(profile)],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("chromium does not answer")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise EOFError("chromium has ended")
            self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        order: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def open(self, page: Path, *, width: int, height: int, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 720,
        )
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def close(self) -> None:
        os.close(self._write)  # Chromium ends when the pipe does
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_page_fits_and_is_quiet(
    report: Report, browser: Browser, tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    browser.open(page, width=width, height=height, dark=dark)
    # open everything: what is folded away must fit too
    assert browser.value("document.querySelectorAll('details').forEach(d => d.open = true); innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    box = browser.value("(r => [r.top, r.bottom])(document.querySelector('h1').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= height
    assert browser.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(19, 23, 27)" if dark else "rgb(252, 252, 250)"
    )
    noise = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
    assert [event for event in browser.events if event.get("method") in noise] == []
    requests = [event for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    assert [event["params"]["request"]["url"] for event in requests] == [page.as_uri()]


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_neither_overlap_nor_shrink(
    make: Callable[[str], Report], browser: Browser, tmp_path: Path, width: int
) -> None:
    page = tmp_path / "report.html"
    for name in ("several", "long_axis"):
        page.write_text(render_html(make(name)), encoding="utf-8")
        browser.open(page, width=width, height=844, dark=False)
        overlaps = browser.value(
            """[...document.querySelectorAll('.plot')].flatMap(plot => {
              const boxes = [...plot.querySelectorAll('text.tick')].map(t => t.getBoundingClientRect());
              return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
                a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3).map(
                b => [plot.getAttribute('aria-label').slice(0, 30), a.left, b.left]));
            })"""
        )
        assert overlaps == []
        smallest = browser.value(
            "Math.min(...[...document.querySelectorAll('.plot text')].map(t => t.getBoundingClientRect().height))"
        )
        assert smallest >= 12
