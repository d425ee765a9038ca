"""A page in headless Chromium, driven through the DevTools pipe: no port, no driver, no sleep that hides a race."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def chromium() -> str:
    """Its path. Without one a test is skipped, but not in CI, which installs it."""
    found = shutil.which("chromium")
    if found is None:
        why = "no chromium here: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found


class Page:
    """One tab. Every call is answered or fails within LIMIT_S."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out = os.fdopen(to_browser, "wb", buffering=0)
        self._in = os.fdopen(from_browser, "rb", buffering=0)
        self._pending = b""
        self._number = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass  # an event
        assert "error" not in answer, answer
        told: dict[str, Any] = answer["result"]
        return told

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            block = self._in.read(65536)
            assert block, "the browser ended"
            self._pending += block
        line, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, url: str, width: int = 1280, height: int = 1000, dark: bool = False) -> None:
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def dark(self) -> None:
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def value(self, script: str) -> Any:
        """Of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, below what is in view too."""
        height = int(self.value("document.documentElement.scrollHeight"))
        width = int(self.value("innerWidth"))
        self.resize(width, height)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._out.close()
        self._in.close()


@contextmanager
def browser() -> Iterator[Page]:
    """Ends with its whole session, whatever happens; a watchdog ends it when it does not answer."""
    binary = chromium()
    profile = tempfile.mkdtemp(prefix="chromium-")
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    # The browser wants the pipes as descriptors 3 and 4.
    start = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    process = subprocess.Popen(
        ["bash", "-c", start, binary, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
        pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"HOME": profile},
    )  # fmt: skip
    os.close(their_in)
    os.close(their_out)

    def end() -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the browser and its helpers
        except ProcessLookupError:
            return

    watchdog = threading.Timer(LIMIT_S, end)
    watchdog.start()
    page = None
    try:
        page = Page(our_out, our_in)
        yield page
    finally:
        watchdog.cancel()
        end()
        process.wait(10)
        if page is not None:
            page.close()
        shutil.rmtree(profile, ignore_errors=True)
