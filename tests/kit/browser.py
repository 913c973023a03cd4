"""A real browser for tests of pages: headless Chromium, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Commands of the browser; Debian's packages are chromium-headless-shell and chromium."""

SECONDS = 30.0
"""Longest wait for an answer."""


def find_browser() -> str | None:
    """The browser of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page in a browser."""

    def __init__(self, command: str, folder: Path) -> None:
        """Start it with a profile in ``folder``."""
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-pipe"
        program = f'exec "{command}" {flags} --user-data-dir="{folder}" about:blank 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", program], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.errors: list[str] = []  # of scripts, and refused by the policy of the page
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requests: list[str] = []

    def call(self, method: str, **values: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> Mapping[str, Any]:
        while b"\0" not in self._rest:
            if not (part := os.read(self._from, 1 << 16)):
                raise RuntimeError("the browser has ended")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        found: Mapping[str, Any] = json.loads(text)
        kind, values = found.get("method"), found.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"]))
        elif kind == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(str(values["entry"]["text"]))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        return found

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True) -> None:
        """Open an address in a window of a size, and wait until it is complete."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.requests, self.errors = [], []
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true in the browser: {expression}")
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move the mouse, or press or release its button."""
        buttons = {"mousePressed": 1, "mouseMoved": 0, "mouseReleased": 0}[kind]
        click = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=buttons, **click)

    def key(self, name: str, text: str = "") -> None:
        """Press a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, path: Path, whole: bool = True) -> bytes:
        """Write a picture of the page as PNG, and return it."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        picture = base64.b64decode(data)
        path.write_bytes(picture)
        return picture

    def close(self) -> None:
        """End it, with its processes."""
        self._session = ""
        with suppress(RuntimeError, OSError):
            self.call("Browser.close")
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser for as long as the context lasts; raises LookupError without one."""
    if (command := find_browser()) is None:
        raise LookupError("no browser: apt-get install chromium-headless-shell")
    browser = Browser(command, folder)
    try:
        yield browser
    finally:
        browser.close()
