"""Headless Chromium, by which pictures are made and pages are tested."""

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_WAIT_S = 90.0


class NavigatedError(Exception):
    """The page was left while an expression was evaluated in it."""


class Browser:
    """Headless Chromium with one page, steered through its DevTools protocol; it reaches this machine alone."""

    def __init__(self, folder: Path) -> None:
        command = [str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command += ["--no-first-run", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        self.stack = ExitStack()
        self.stack.callback(self._end, subprocess.Popen(command, stderr=subprocess.DEVNULL))
        port = folder / "DevToolsActivePort"
        until = time.monotonic() + _WAIT_S
        while not port.is_file() or "\n" not in port.read_text():
            assert time.monotonic() < until, "the browser does not start"
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json") as answer:
            [page] = [one for one in json.load(answer) if one["type"] == "page"]
        self.socket = self.stack.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
        self.numbers = itertools.count(1)
        self.told: list[dict[str, Any]] = []
        """Errors, and what was written to the console."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait()

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": values}))
        while True:
            answer = json.loads(self.socket.recv(timeout=_WAIT_S))
            if answer.get("id") == number:
                if re.search("navigated|context was destroyed", answer.get("error", {}).get("message", "")):
                    raise NavigatedError(method)
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.told.append(answer["params"])

    def open(self, address: str, width: int = 1160, height: int = 918, scheme: str = "light") -> None:
        """Open a page in a window of some size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState == 'complete'")

    def run(self, program: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=program, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _WAIT_S
        while True:
            with suppress(NavigatedError):
                if self.run(f"Boolean({condition})"):
                    return
            assert time.monotonic() < until, f"not within {_WAIT_S} s: {condition}"
            time.sleep(0.03)

    def enter(self, selector: str, text: str) -> None:
        """Type a text into a field, or choose it."""
        field = f"document.querySelector({json.dumps(selector)})"
        event = "new Event('input', {bubbles: true})"
        self.run(f"{{ {field}.value = {json.dumps(text)}; {field}.dispatchEvent({event}); 0 }}")

    def picture(self) -> bytes:
        """Return what the window shows as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
