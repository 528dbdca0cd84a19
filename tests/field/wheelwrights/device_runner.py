"""Single-host job runner.  Jobs get whole GPUs for their lifetime.

    runner = JobRunner(Devices(8))
    runner.submit(Job("reindex-a", gpus=2, argv=[...]))
    while runner.step(): time.sleep(1)
"""
from __future__ import annotations

import heapq
import logging
import os
import subprocess
import time
from dataclasses import dataclass, field
from typing import Callable

log = logging.getLogger("runner")


@dataclass
class Job:
    name: str
    gpus: int
    argv: list[str]
    tenant: str = "default"
    priority: int = 0
    devices: list[int] = field(default_factory=list)
    proc: subprocess.Popen | None = None
    tries: int = 0


class Devices:
    """Device numbers in a heap, so that jobs get low neighbours."""

    def __init__(self, n: int) -> None:
        self._heap = list(range(n))
        heapq.heapify(self._heap)
        self.sick: set[int] = set()

    @property
    def idle(self) -> int:
        return len(self._heap)

    def grant(self, n: int) -> list[int] | None:
        if len(self._heap) < n:
            return None
        return [heapq.heappop(self._heap) for _ in range(n)]  # clean: returned to the caller

    def grant_healthy(self, n: int) -> list[int] | None:
        out: list[int] = []
        while self._heap and len(out) < n:
            d = heapq.heappop(self._heap)  # leak: the devices collected so far are lost when fewer than n are healthy
            if d not in self.sick:
                out.append(d)
        return out if len(out) == n else None

    def grant_pair(self, aligned: bool) -> tuple[int, int] | None:
        if len(self._heap) < 2:
            return None
        a = heapq.heappop(self._heap)  # clean: near miss, pushed back when the pair is not aligned
        b = heapq.heappop(self._heap)  # clean: pushed back together with a
        if aligned and (a % 2 or b != a + 1):
            heapq.heappush(self._heap, a)
            heapq.heappush(self._heap, b)
            return None
        return a, b

    def vacate(self, devs) -> None:
        for d in devs:
            if d not in self.sick:
                heapq.heappush(self._heap, d)

    def heal(self, d: int) -> None:
        if d in self.sick:
            self.sick.discard(d)
            heapq.heappush(self._heap, d)


class JobRunner:
    def __init__(self, devices: Devices, probe: Callable[[int], bool] = lambda d: True) -> None:
        self.devices = devices
        self.probe = probe
        self.waiting: list[Job] = []
        self.running: dict[str, Job] = {}
        self.finished: list[tuple[str, int]] = []

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self.waiting.sort(key=lambda j: -j.priority)

    def _spawn(self, job: Job) -> bool:
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, job.devices)))
        try:
            job.proc = subprocess.Popen(job.argv, env=env)
        except OSError as e:
            log.error("%s: %s", job.name, e)
            return False
        return True

    def schedule(self) -> int:
        started = 0
        still: list[Job] = []
        for job in self.waiting:
            devs = self.devices.grant(job.gpus)  # clean: near miss, vacated when the spawn fails, else in self.running
            if devs is None:
                still.append(job)
                continue
            job.devices = devs
            if not self._spawn(job):
                self.devices.vacate(job.devices)
                job.devices = []
                self.finished.append((job.name, -1))
                continue
            self.running[job.name] = job
            started += 1
        self.waiting = still
        return started

    def start_now(self, job: Job) -> bool:
        """Interactive jobs do not wait."""
        devs = self.devices.grant(job.gpus)  # leak: not vacated when the spawn fails
        if devs is None:
            return False
        job.devices = devs
        if not self._spawn(job):
            return False
        self.running[job.name] = job
        return True

    def start_probed(self, job: Job) -> bool:
        devs = self.devices.grant_healthy(job.gpus)  # leak: only the failing device is vacated when a probe fails
        if devs is None:
            return False
        for d in devs:
            if not self.probe(d):
                self.devices.vacate([d])
                return False
        job.devices = devs
        self.running[job.name] = job
        if not self._spawn(job):
            self.running.pop(job.name)
            self.devices.vacate(devs)
            return False
        return True

    def reap(self) -> None:
        for name in list(self.running):
            job = self.running[name]
            rc = job.proc.poll() if job.proc else -1
            if rc is None:
                continue
            del self.running[name]
            self.devices.vacate(job.devices)
            job.devices = []
            self.finished.append((name, rc))

    def step(self) -> bool:
        self.reap()
        self.schedule()
        return bool(self.running or self.waiting)

    def kill(self, name: str) -> None:
        job = self.running.pop(name, None)
        if job is None:
            return
        job.proc.terminate()
        job.proc.wait()
        self.devices.vacate(job.devices)

    def migrate(self, name: str) -> bool:
        job = self.running[name]
        fresh = self.devices.grant(len(job.devices))  # clean: vacated when the spawn fails, else the job's devices
        if fresh is None:
            return False
        old, job.devices = job.devices, fresh
        old_proc = job.proc
        if not self._spawn(job):
            job.devices = old
            self.devices.vacate(fresh)
            return False
        old_proc.terminate()
        old_proc.wait()
        self.devices.vacate(old)
        return True


class Bench:
    """Short-lived measurements on borrowed devices."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.results: dict[int, float] = {}

    def bandwidth(self, measure: Callable[[int, int], float]) -> float | None:
        pair = self.devices.grant_pair(aligned=True)  # clean: vacated in finally
        if pair is None:
            return None
        try:
            return measure(*pair)
        finally:
            self.devices.vacate(pair)

    def sweep(self, measure: Callable[[int], float], deadline: float) -> int:
        n = 0
        while time.monotonic() < deadline:
            devs = self.devices.grant(1)  # leak: break on a negative reading keeps the device
            if devs is None:
                break
            gbps = measure(devs[0])
            if gbps < 0:
                self.results[devs[0]] = 0.0
                break
            self.results[devs[0]] = gbps
            self.devices.vacate(devs)
            n += 1
        return n

    def burn_in(self, check: Callable[[int], bool], attempts: int = 3) -> bool:
        devs = self.devices.grant(1)  # leak: a retry rebinds devs while the first device is out
        for _ in range(attempts):
            if devs is None:
                return False
            if check(devs[0]):
                self.devices.vacate(devs)
                return True
            devs = self.devices.grant(1)  # leak: rebound on the next failing attempt and dropped after the last
        if devs is not None:
            log.info("burn-in gave up")
        return False
