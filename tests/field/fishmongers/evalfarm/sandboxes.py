"""A bounded pool of sandbox processes, used again until tainted or worn out."""
from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .ports import NoPorts, PortRange

log = logging.getLogger(__name__)


class FarmBusy(RuntimeError):
    """No sandbox became free in time."""


class BootFailed(RuntimeError):
    """The sandbox process did not open its control port."""


@dataclass(eq=False)
class Sandbox:
    root: Path
    port: int
    proc: subprocess.Popen
    runs: int = 0
    tainted: bool = False


class SandboxPool:
    def __init__(self, ports: PortRange, image: str, size: int, max_runs: int = 50) -> None:
        self._ports = ports
        self._image = image
        self._max_runs = max_runs
        self._gate = threading.BoundedSemaphore(size)
        self._idle: list[Sandbox] = []
        self._lock = threading.Lock()

    def _ready(self, port: int, patience: float = 5.0) -> bool:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=0.5):  # clean: context manager
                    return True
            except OSError:
                time.sleep(0.05)
        return False

    def _boot(self) -> Sandbox:
        port = self._ports.claim()  # leak: BootFailed is raised after the process and the directory are gone, but not the port
        root = Path(tempfile.mkdtemp(prefix="box-"))  # clean: near miss, removed when the boot fails, otherwise by _scrap()
        proc = subprocess.Popen(["sandboxd", self._image, str(root), str(port)])  # clean: killed when the boot fails, otherwise by _scrap()
        if not self._ready(port):
            proc.kill()
            proc.wait()
            shutil.rmtree(root, ignore_errors=True)
            raise BootFailed(self._image)
        return Sandbox(root, port, proc)

    def _scrap(self, box: Sandbox) -> None:
        box.proc.kill()
        box.proc.wait()
        shutil.rmtree(box.root, ignore_errors=True)
        self._ports.free(box.port)

    def checkout(self, timeout: float = 30.0) -> Sandbox:
        if not self._gate.acquire(timeout=timeout):  # clean: released when the boot fails, otherwise in restore()
            raise FarmBusy(f"nothing free within {timeout}s")
        with self._lock:
            box = self._idle.pop() if self._idle else None  # clean: returned
        if box is None:
            try:
                box = self._boot()  # clean: returned
            except (BootFailed, NoPorts):
                self._gate.release()
                raise
        box.runs += 1
        return box

    def restore(self, box: Sandbox) -> None:
        if box.tainted or box.runs >= self._max_runs:
            log.debug("scrapping %s after %d runs", box.root, box.runs)
            self._scrap(box)
        else:
            with self._lock:
                self._idle.append(box)
        self._gate.release()

    @contextlib.contextmanager
    def borrowed(self, timeout: float = 30.0) -> Iterator[Sandbox]:
        box = self.checkout(timeout)  # clean: finally
        try:
            yield box
        except subprocess.TimeoutExpired:
            box.tainted = True
            raise
        finally:
            self.restore(box)

    def shutdown(self) -> None:
        while self._idle:
            self._scrap(self._idle.pop())  # clean: scrapped
