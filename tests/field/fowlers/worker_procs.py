"""Starts the worker processes of a node: ports, device slots, log files, restarts."""
from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Optional, Sequence

log = logging.getLogger(__name__)


class PortBook:
    """Ports of this node which may be used for rendezvous."""

    def __init__(self, low: int, high: int) -> None:
        self._open = set(range(low, high))
        self._mutex = threading.Lock()

    def claim(self) -> int:
        with self._mutex:
            return self._open.pop()

    def relinquish(self, port: int) -> None:
        with self._mutex:
            self._open.add(port)


class DeviceSlots:
    """Which accelerators are taken. take() gives -1 when none is left."""

    def __init__(self, count: int) -> None:
        self._owner: list[Optional[str]] = [None] * count

    def take(self, owner: str) -> int:
        for i, who in enumerate(self._owner):
            if who is None:
                self._owner[i] = owner
                return i
        return -1

    def take_many(self, owner: str, n: int) -> list[int]:
        if self._owner.count(None) < n:
            return []
        return [self.take(owner) for _ in range(n)]  # clean: handed on in the list

    def free(self, index: int) -> None:
        self._owner[index] = None

    def free_many(self, indices: Sequence[int]) -> None:
        for i in indices:
            self.free(i)


@dataclass
class Spec:
    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    needs_port: bool = False


@dataclass
class Worker:
    spec: Spec
    proc: subprocess.Popen
    device: int
    port: Optional[int] = None
    logfile: Optional[IO[bytes]] = None


def spawn(spec: Spec, device: int, port: Optional[int], sink) -> subprocess.Popen:
    env = dict(os.environ, **spec.env, LOCAL_DEVICE=str(device))
    if port is not None:
        env["MASTER_PORT"] = str(port)
    return subprocess.Popen([sys.executable, *spec.argv], env=env, stdout=sink, stderr=subprocess.STDOUT)


class NodeLauncher:
    """Runs workers until stop; everything a worker took is given back in _reap."""

    def __init__(self, ports: PortBook, slots: DeviceSlots, logdir: Path) -> None:
        self.ports, self.slots, self.logdir = ports, slots, logdir
        self._workers: dict[str, Worker] = {}

    def start(self, spec: Spec) -> bool:
        device = self.slots.take(spec.name)  # clean: near miss, kept in the worker, _reap frees it
        if device < 0:
            return False
        port = self.ports.claim() if spec.needs_port else None  # clean: near miss, _reap relinquishes it where there is one
        sink = open(self.logdir / f"{spec.name}.log", "ab")  # clean: near miss, _reap closes it
        proc = spawn(spec, device, port, sink)
        self._workers[spec.name] = Worker(spec, proc, device, port, sink)
        return True

    def _reap(self, worker: Worker) -> int:
        code = worker.proc.wait()
        worker.logfile.close()
        if worker.port is not None:
            self.ports.relinquish(worker.port)
        self.slots.free(worker.device)
        return code

    def poll(self) -> dict[str, int]:
        ended = [w for w in self._workers.values() if w.proc.poll() is not None]
        return {w.spec.name: self._reap(self._workers.pop(w.spec.name)) for w in ended}

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.proc.terminate()
            self._reap(worker)
        self._workers.clear()


class RestartingLauncher:
    """A worker that has failed is started again on the same device with a fresh port."""

    def __init__(self, ports: PortBook, slots: DeviceSlots, limit: int = 3) -> None:
        self.ports, self.slots, self.limit = ports, slots, limit

    def run(self, spec: Spec) -> int:
        device = self.slots.take(spec.name)  # clean: freed after the last attempt
        if device < 0:
            return 75
        code = 1
        for attempt in range(self.limit):
            port = self.ports.claim()  # leak: a failed attempt goes round with its port
            proc = spawn(spec, device, port, None)
            code = proc.wait()
            if code != 0:
                log.warning("%s: attempt %d ended with %d", spec.name, attempt, code)
                time.sleep(2 ** attempt)
                continue
            self.ports.relinquish(port)
            break
        self.slots.free(device)
        return code

    def run_pair(self, leader: Spec, follower: Spec) -> Optional[int]:
        first = self.slots.take(leader.name)  # leak: kept when there is no device for the follower
        if first < 0:
            return None
        second = self.slots.take(follower.name)  # clean: freed at the end, -1 holds nothing
        if second < 0:
            log.info("no device for %s", follower.name)
            return None
        port = self.ports.claim()  # clean: relinquished at the end
        a, b = spawn(leader, first, port, None), spawn(follower, second, port, None)
        code = a.wait() or b.wait()
        for device in (second, first):
            self.slots.free(device)
        self.ports.relinquish(port)
        return code


def smoke_test(slots: DeviceSlots, spec: Spec, timeout: float) -> str:
    device = slots.take("smoke")  # leak: the way of the exceeded timeout does not free it
    if device < 0:
        return "busy"
    proc = spawn(spec, device, None, subprocess.DEVNULL)
    deadline = time.monotonic() + timeout
    while proc.poll() is None:
        if time.monotonic() > deadline:
            proc.kill()
            return "timeout"
        time.sleep(0.05)
    slots.free(device)
    return "ok" if proc.returncode == 0 else "failed"


def tail(path: Path, lines: int) -> list[bytes]:
    f = open(path, "rb")  # leak: an empty log returns with the file open
    f.seek(0, os.SEEK_END)
    size = f.tell()
    if size == 0:
        return []
    f.seek(max(0, size - 400 * lines))
    rows = f.read().splitlines()[-lines:]
    f.close()
    return rows


def watch_until_failure(launcher: NodeLauncher, gate: threading.Semaphore) -> Optional[str]:
    while True:
        gate.acquire()  # leak: the return on a failed worker keeps the gate shut
        for name, code in launcher.poll().items():
            if code != 0:
                return name
        gate.release()
        if not launcher._workers:
            return None
        time.sleep(0.5)
