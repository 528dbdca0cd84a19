"""Places training and batch inference jobs on the GPUs of one host."""
from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
from dataclasses import dataclass, field
from typing import Optional

log = logging.getLogger("gpu_jobs")


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class DeviceTable:
    """Which devices are free. A device that is claimed is vacated by its holder."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._lock = threading.RLock()
        self._sick: set[int] = set()

    def claim(self) -> Optional[int]:
        with self._lock:
            if not self._free:
                return None
            return heapq.heappop(self._free)

    def vacate(self, device: int) -> None:
        with self._lock:
            heapq.heappush(self._free, device)

    def mark_sick(self, device: int) -> None:
        self._sick.add(device)

    def is_sick(self, device: int) -> bool:
        return device in self._sick

    def claim_many(self, count: int) -> Optional[list[int]]:
        """All or nothing."""
        got: list[int] = []
        with self._lock:
            for _ in range(count):
                device = self.claim()  # clean: near miss, a partial set is vacated before None is returned
                if device is None:
                    for held in got:
                        self.vacate(held)
                    return None
                got.append(device)
        return got

    def claim_adjacent(self) -> Optional[tuple[int, int]]:
        """Two devices that share a link."""
        with self._lock:
            first = self.claim()  # leak: kept when the second is missing, the caller sees None
            if first is None:
                return None
            second = self.claim()  # clean: returned, or vacated together with the first
            if second is None:
                return None
            if second != first + 1:
                self.vacate(first)
                self.vacate(second)
                return None
            return first, second

    def vacate_many(self, devices: list[int]) -> None:
        for device in devices:
            self.vacate(device)


class HostMemory:
    """A budget of pinned host memory in MiB."""

    def __init__(self, total: int) -> None:
        self.left = total

    def take(self, amount: int) -> bool:
        if amount > self.left:
            return False
        self.left -= amount
        return True

    def put(self, amount: int) -> None:
        self.left += amount


@dataclass(order=True)
class Job:
    priority: int
    serial: int
    name: str = field(compare=False)
    gpus: int = field(compare=False, default=1)
    host_mib: int = field(compare=False, default=0)
    state: State = field(compare=False, default=State.QUEUED)
    devices: list[int] = field(compare=False, default_factory=list)
    spare: Optional[int] = field(compare=False, default=None)


class JobRunner:
    def __init__(self, table: DeviceTable, memory: HostMemory) -> None:
        self.table = table
        self.memory = memory
        self.queue: list[Job] = []
        self.running: dict[str, Job] = {}
        self.history: list[Job] = []
        self._serial = itertools.count()

    def submit(self, name: str, gpus: int, host_mib: int, priority: int = 10) -> Job:
        job = Job(priority, next(self._serial), name, gpus, host_mib)
        heapq.heappush(self.queue, job)
        return job

    def start_next(self) -> Optional[Job]:
        if not self.queue:
            return None
        job = self.queue[0]
        devices = self.table.claim_many(job.gpus)  # clean: vacated if there is no memory, else by complete()
        if devices is None:
            return None
        if not self.memory.take(job.host_mib):  # clean: put back by complete()
            self.table.vacate_many(devices)
            return None
        heapq.heappop(self.queue)
        job.devices = devices
        job.state = State.RUNNING
        self.running[job.name] = job
        return job

    def complete(self, name: str, ok: bool) -> None:
        job = self.running.pop(name)
        job.state = State.DONE if ok else State.FAILED
        self.memory.put(job.host_mib)
        self.table.vacate_many(job.devices)
        job.devices = []
        if job.spare is not None:
            self.table.vacate(job.spare)
            job.spare = None
        self.history.append(job)

    def add_spare(self, name: str) -> bool:
        """Gives a running job a hot spare, at most one."""
        job = self.running.get(name)
        if job is None or job.spare is not None:
            return False
        job.spare = self.table.claim()  # clean: near miss, complete() vacates the spare
        return job.spare is not None

    def migrate(self, name: str) -> bool:
        job = self.running[name]
        fresh = self.table.claim_many(job.gpus)  # leak: lost where one of the new devices is sick
        if fresh is None:
            return False
        if any(self.table.is_sick(device) for device in fresh):
            log.warning("not moving %s onto a sick device", name)
            return False
        old, job.devices = job.devices, fresh
        self.table.vacate_many(old)
        return True

    def burn_in(self, rounds: int) -> dict[int, bool]:
        """Exercises free devices one after another."""
        verdict: dict[int, bool] = {}
        for _ in range(rounds):
            device = self.table.claim()  # leak: break on a sick device leaves it claimed
            if device is None:
                break
            verdict[device] = not self.table.is_sick(device)
            if not verdict[device]:
                log.error("device %d did not pass", device)
                break
            self.table.vacate(device)
        return verdict

    def interactive(self, name: str, want_pair: bool) -> Optional[str]:
        """Runs a short interactive session in place."""
        pair = self.table.claim_adjacent() if want_pair else None  # clean: near miss, vacated under the same flag
        single = None if want_pair else self.table.claim()  # leak: vacated only under want_pair
        if pair is None and single is None:
            return None
        label = f"{name}:{pair if pair is not None else single}"
        log.info("interactive session %s", label)
        if want_pair and pair is not None:
            self.table.vacate(pair[0])
            self.table.vacate(pair[1])
        return label

    def reserve_staging(self, name: str, mib: int) -> bool:
        if not self.memory.take(mib):  # leak: budget not put back for a job that is not running
            return False
        job = self.running.get(name)
        if job is None:
            return False
        job.host_mib += mib
        return True
