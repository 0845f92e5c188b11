"""A real browser without a window, steered by its DevTools protocol: what a page shows, and how it looks."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 120


class Browser:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.numbers = socket, itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=SECONDS))
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return what an expression is."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        values = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def resize(self, width: int, height: int, scheme: str) -> None:
        """Give the tab a size in pixels, and say whether the user likes "light" or "dark"."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def save_picture(self, path: Path) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own; it ends with the block."""
    assert CHROMIUM
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    more = ["--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={folder}"]
    process = subprocess.Popen([CHROMIUM, *options, *more, "about:blank"], stderr=subprocess.DEVNULL)
    try:
        place = folder / "DevToolsActivePort"
        deadline = time.monotonic() + SECONDS
        while not place.is_file() or len(place.read_text().split()) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        port = place.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
            tab = next(page for page in json.load(answer) if page["type"] == "page")
        with connect(tab["webSocketDebuggerUrl"], max_size=2**26, open_timeout=SECONDS) as socket:
            yield Browser(socket)
    finally:
        process.kill()
        process.wait()
