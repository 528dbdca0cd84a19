"""Single-node scheduler that hands GPU slots to queued training jobs."""
from __future__ import annotations

import heapq
import itertools
import logging
import os
import subprocess
import threading
from dataclasses import dataclass

log = logging.getLogger("sched.gpu")


class PlacementError(RuntimeError): ...
class ProbeTimeout(RuntimeError): ...


@dataclass
class GpuSlot:
    index: int
    memory_gb: int


@dataclass
class Job:
    name: str
    command: list[str]
    gpus: int = 1
    min_memory_gb: int = 0
    priority: int = 10
    retries_left: int = 1
    state: str = "queued"


@dataclass
class RunningJob:
    job: Job
    slots: list[GpuSlot]
    proc: subprocess.Popen


class SlotPool:
    def __init__(self, memory_gb: list[int]):
        self._free = [GpuSlot(i, gb) for i, gb in enumerate(memory_gb)]
        self._cond = threading.Condition()
        self.total = len(self._free)

    def acquire(self, timeout: float | None = None) -> GpuSlot | None:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.pop(0)  # clean: returned to the caller

    def acquire_fitting(self, min_gb: int) -> GpuSlot | None:
        with self._cond:
            for pos, slot in enumerate(self._free):
                if slot.memory_gb >= min_gb:
                    return self._free.pop(pos)  # clean: returned to the caller
        return None

    def acquire_many(self, count: int) -> list[GpuSlot]:
        with self._cond:
            if len(self._free) < count:
                raise PlacementError(f"{count} slots wanted, {len(self._free)} idle")
            return [self._free.pop() for _ in range(count)]  # clean: the length is checked under the same lock, the list is returned

    def release(self, slot: GpuSlot) -> None:
        with self._cond:
            self._free.append(slot)
            self._free.sort(key=lambda s: s.memory_gb)
            self._cond.notify()

    def release_all(self, slots: list[GpuSlot]) -> None:
        for slot in slots:
            self.release(slot)


class Launcher:
    def launch(self, job: Job, slots: list[GpuSlot]) -> subprocess.Popen:
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(str(s.index) for s in slots))
        return subprocess.Popen(job.command, env=env)

    def migrate(self, proc: subprocess.Popen, slot: GpuSlot) -> bool:
        return subprocess.call(["gpu-migrate", str(proc.pid), str(slot.index)]) == 0


class Scheduler:
    def __init__(self, pool: SlotPool, launcher: Launcher):
        self._pool = pool
        self._launcher = launcher
        self._queue: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._names: set[str] = set()
        self._running: dict[str, RunningJob] = {}
        self._shells: dict[str, GpuSlot] = {}
        self._parked: list[GpuSlot] = []

    def submit(self, job: Job) -> bool:
        if job.name in self._names:
            return False
        self._names.add(job.name)
        self._push(job)
        return True

    def _push(self, job: Job) -> None:
        job.state = "queued"
        heapq.heappush(self._queue, (job.priority, next(self._order), job))

    def _place(self, job: Job) -> list[GpuSlot]:
        if not job.min_memory_gb:
            return self._pool.acquire_many(job.gpus)  # clean: returned to _start
        picked: list[GpuSlot] = []
        for _ in range(job.gpus):
            slot = self._pool.acquire_fitting(job.min_memory_gb)  # leak: when a later one is missing, PlacementError is raised and those picked before are dropped
            if slot is None:
                raise PlacementError(f"no slot with {job.min_memory_gb} GB for {job.name}")
            picked.append(slot)
        return picked

    def _start(self, job: Job) -> bool:
        slots = self._place(job)  # leak: the handled OSError of a failed launch forgets the slots
        try:
            proc = self._launcher.launch(job, slots)
        except OSError as exc:
            log.error("could not launch %s: %s", job.name, exc)
            job.state = "failed"
            self._names.discard(job.name)
            return False
        job.state = "running"
        self._running[job.name] = RunningJob(job, slots, proc)
        return True

    def tick(self) -> int:
        started = 0
        self.reap()
        while self._queue:
            job = heapq.heappop(self._queue)[-1]
            try:
                started += self._start(job)
            except PlacementError as exc:
                log.info("postponed: %s", exc)
                self._push(job)
                break
        return started

    def backfill(self, job: Job) -> bool:
        """Run a short job on whatever happens to be idle."""
        if job.name in self._names:
            return False
        slot = self._pool.acquire(timeout=0)  # leak: the return for a job that does not fit keeps the slot
        if slot is None:
            return False
        if job.gpus != 1 or slot.memory_gb < job.min_memory_gb:
            log.debug("%s does not fit on slot %d", job.name, slot.index)
            return False
        self._names.add(job.name)
        self._running[job.name] = RunningJob(job, [slot], self._launcher.launch(job, [slot]))
        return True

    def reap(self) -> None:
        for name, running in list(self._running.items()):
            code = running.proc.poll()
            if code is None:
                continue
            del self._running[name]
            self._pool.release_all(running.slots)
            if code != 0 and running.job.retries_left > 0:
                running.job.retries_left -= 1
                self._push(running.job)
                continue
            running.job.state = "done" if code == 0 else "failed"
            self._names.discard(name)

    def move(self, name: str, min_gb: int) -> bool:
        running = self._running.get(name)
        if running is None or len(running.slots) != 1:
            return False
        bigger = self._pool.acquire_fitting(min_gb)  # clean: near miss, takes the place of the old slot in the running job, which reap() gives back
        if bigger is None:
            return False
        if not self._launcher.migrate(running.proc, bigger):
            self._pool.release(bigger)
            return False
        old, running.slots[0] = running.slots[0], bigger
        self._pool.release(old)
        return True

    def open_shell(self, user: str) -> int | None:
        slot = self._pool.acquire(timeout=5.0)  # leak: a second shell of the same user overwrites the entry of the first
        if slot is None:
            return None
        self._shells[user] = slot
        return slot.index

    def close_shell(self, user: str) -> None:
        slot = self._shells.pop(user, None)
        if slot is not None:
            self._pool.release(slot)

    def pause(self) -> int:
        """Take idle slots out of service until resume()."""
        while (slot := self._pool.acquire(timeout=0)) is not None:  # clean: near miss, parked until resume(), which shutdown() also calls
            self._parked.append(slot)
        return len(self._parked)

    def resume(self) -> None:
        parked, self._parked = self._parked, []
        self._pool.release_all(parked)

    def shutdown(self) -> None:
        for running in self._running.values():
            running.proc.terminate()
            self._pool.release_all(running.slots)
        self._running.clear()
        for user in list(self._shells):
            self.close_shell(user)
        self.resume()


class HealthProbe(threading.Thread):
    def __init__(self, pool: SlotPool):
        super().__init__(name="gpu-health", daemon=True)
        self._pool = pool
        self._halt = threading.Event()
        self.timeouts = 0

    def _probe(self, slot: GpuSlot) -> None:
        if subprocess.call(["gpu-ping", "--deadline=5", str(slot.index)]) == 124:
            raise ProbeTimeout(f"slot {slot.index} is silent")

    def run(self) -> None:
        while not self._halt.wait(30.0):
            slot = self._pool.acquire(timeout=1.0)  # leak: after a ProbeTimeout the loop goes on without a release
            if slot is None:
                continue
            try:
                self._probe(slot)
            except ProbeTimeout as exc:
                self.timeouts += 1
                log.warning("probe: %s", exc)
                continue
            self._pool.release(slot)


def peer_bandwidth(pool: SlotPool) -> float | None:
    second = None
    first = pool.acquire(timeout=1.0)  # clean: released in the finally, with or without the second
    try:
        if first is None:
            return None
        second = pool.acquire(timeout=1.0)  # clean: near miss, the finally looks at both names
        if second is None:
            return None
        return float(subprocess.check_output(["gpu-p2p", str(first.index), str(second.index)]))
    finally:
        for slot in (first, second):
            if slot is not None:
                pool.release(slot)
