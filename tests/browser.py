"""A real browser without a driver: headless Chromium, spoken to over the pipe of its debugging protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60.0
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# The protocol wants file descriptors 3 and 4, which only the child may rearrange.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Tab": ("Tab", ""), "Enter": ("Enter", "\r"), "Escape": ("Escape", "")}


class Browser:
    """One page of one browser process; what its console complained of is in `complaints`."""

    def __init__(self) -> None:
        assert CHROMIUM
        self.complaints: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        options = [*OPTIONS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(to_read), str(to_write), CHROMIUM, *options, "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        target = next(t for t in self._targets() if t["type"] == "page")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Performance.enable", timeDomain="threadTicks")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def open(self, file: Path) -> None:
        """Load the file anew and wait until its script has run."""
        self.run("window.left = true")  # by which the page before, perhaps of the same file, is told apart
        url = file.resolve().as_uri()
        self._call("Page.navigate", url=url)
        self.wait(
            f"!window.left && document.readyState === 'complete' && location.href === {json.dumps(url)}"
        )

    def resize(self, width: int, height: int, *, scale: float = 1.0, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])

    def on_paper(self) -> None:
        """Style the page as for print."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description", "failed"))
        return done["result"].get("value")

    def busy(self) -> float:
        """Seconds of processor time that the page's main thread has used since it was opened."""
        metrics = {each["name"]: each["value"] for each in self._call("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    def wait(self, condition: str) -> None:
        """Until `condition` is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str) -> None:
        name, text = _KEYS.get(key, (key, key))
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name, text=text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, file: Path) -> None:
        shot = self._call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def _targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("Target.getTargets")["targetInfos"]
        return found

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._heed(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], end - time.monotonic())[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _heed(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(parameters["args"]))
