"""A real headless Chromium for tests, driven over a pipe with the DevTools protocol. Standard library only.

A `Browser` is one process with an empty profile and no way to a network: every host name resolves to nothing. A `Page`
collects what went wrong while it lived: console errors, uncaught exceptions, and every address that was asked for.

Tests that need it call `chromium_or_skip`. Debian's package is called ``chromium``.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-extensions",
    "--window-size=1280,900", "--remote-debugging-pipe",
)  # fmt: skip
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ANSWER_S = 120.0
# A page of ten thousand stages on a busy machine takes seconds; a browser that hangs fails the test here.
FIRST_FREE_FD = 10
# Chromium reads commands from 3 and writes answers to 4, so ours are moved out of the way first.


def chromium_or_skip() -> str:
    """Return the path of a Chromium, or skip the test."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium here; Debian's package is called chromium")


@dataclass(kw_only=True)
class Page:
    """A tab: what it is asked and what it did wrong."""

    browser: Browser
    session: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def open(self, address: str) -> None:
        """Go to an address and wait until it has loaded."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + ANSWER_S
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < until, f"still false: {expression}; {self.problems}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def heard(self, event: dict[str, Any]) -> None:
        """Keep what an event says, where it is of interest."""
        parameters = event["params"]
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(json.dumps(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])


class Browser:
    """One Chromium process."""

    def __init__(self, program: str, profile: str) -> None:
        read_fd, self._out = os.pipe()
        self._in, write_fd = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE_FD) for fd in (read_fd, write_fd)]

        def as_three_and_four() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, NO_NETWORK, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=as_three_and_four, pass_fds=(3, 4),
        )  # fmt: skip
        for fd in (read_fd, write_fd, *theirs):
            os.close(fd)
        self._buffer = bytearray()
        self._count = 0
        self._pages: dict[str, Page] = {}

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; events that come meanwhile go to their pages."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        self._write(command if session is None else {**command, "sessionId": session})
        until = time.monotonic() + ANSWER_S
        while True:
            answer = self._read(until)
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer and (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.heard(answer)

    def new_page(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(browser=self, session=session)
        return page

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _write(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._out, data) :]

    def _read(self, until: float) -> dict[str, Any]:
        while (end := self._buffer.find(b"\0")) < 0:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium gave no answer within {ANSWER_S:.0f} s"
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        message: dict[str, Any] = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        return message


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Yield a browser with an empty profile, or skip the test where there is none."""
    program = chromium_or_skip()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()
