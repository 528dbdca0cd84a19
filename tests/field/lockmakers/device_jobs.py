"""A small job runner that leases GPUs out of a heap of free ordinals."""
import heapq
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch


class NoDevice(Exception):
    pass


class DeviceDesk:
    """Lowest free ordinal first. Ordinals are plain ints."""

    def __init__(self, count):
        self._heap = list(range(count))
        heapq.heapify(self._heap)
        self._mu = threading.Lock()
        self._freed = threading.Condition(self._mu)

    def lease(self, wait=0.0) -> int:
        deadline = time.monotonic() + wait
        with self._freed:
            while not self._heap:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NoDevice("all devices are busy")
                self._freed.wait(left)
            return heapq.heappop(self._heap)  # clean: returned to the caller

    def lease_or_none(self) -> Optional[int]:
        with self._mu:
            return heapq.heappop(self._heap) if self._heap else None  # clean: returned to the caller

    def lease_many(self, n) -> list:
        with self._mu:
            got = []
            while len(got) < n and self._heap:
                got.append(heapq.heappop(self._heap))  # leak: a short gang returns an empty list and forgets what it popped
            if len(got) < n:
                return []
            return got

    def surrender(self, ordinal: int):
        with self._freed:
            heapq.heappush(self._heap, ordinal)
            self._freed.notify()


@dataclass
class Job:
    name: str
    fn: Callable
    gang: int = 1
    ordinals: list = field(default_factory=list)
    error: Optional[BaseException] = None
    cancelled: bool = False


class Runner:
    def __init__(self, desk: DeviceDesk):
        self.desk = desk
        self.running = {}
        self.finished = []

    # -- single device ------------------------------------------------

    def run_one(self, job: Job):
        dev = self.desk.lease(wait=5.0)  # clean: given back in finally
        try:
            with torch.cuda.device(dev):
                return job.fn(dev)
        finally:
            self.desk.surrender(dev)

    def run_checked(self, job: Job):
        dev = self.desk.lease()  # leak: a cancelled job returns without surrendering
        if job.cancelled:
            self.finished.append(job)
            return None
        try:
            return job.fn(dev)
        except RuntimeError as exc:
            job.error = exc
            return None
        finally:
            self.desk.surrender(dev)

    def run_capturing(self, job: Job):
        dev = self.desk.lease_or_none()  # leak: the RuntimeError arm returns without surrendering
        if dev is None:
            return False
        try:
            job.fn(dev)
        except RuntimeError as exc:
            job.error = exc
            self.finished.append(job)
            return False
        self.desk.surrender(dev)
        self.finished.append(job)
        return True

    # -- gangs --------------------------------------------------------

    def start_gang(self, job: Job) -> bool:
        for _ in range(job.gang):
            dev = self.desk.lease_or_none()  # clean: near miss, kept in job.ordinals, which the rollback and finish_gang both empty
            if dev is None:
                self._unwind(job)
                return False
            job.ordinals.append(dev)
        self.running[job.name] = job
        return True

    def _unwind(self, job: Job):
        while job.ordinals:
            self.desk.surrender(job.ordinals.pop())

    def finish_gang(self, name: str):
        job = self.running.pop(name)
        self._unwind(job)
        self.finished.append(job)

    def start_pair(self, job: Job) -> bool:
        a = self.desk.lease_or_none()  # leak: kept when the second device is missing
        if a is None:
            return False
        b = self.desk.lease_or_none()  # clean: moved into job.ordinals with the first
        if b is None:
            return False
        job.ordinals.extend((a, b))
        self.running[job.name] = job
        return True

    def start_pair_strict(self, job: Job) -> bool:
        a = self.desk.lease_or_none()  # clean: surrendered when the second is missing, else held by the job
        if a is None:
            return False
        b = self.desk.lease_or_none()  # clean: held by the running job
        if b is None:
            self.desk.surrender(a)
            return False
        job.ordinals = [a, b]
        self.running[job.name] = job
        return True

    def regrow(self, name: str, gang: int):
        job = self.running[name]
        extra = self.desk.lease_many(gang - len(job.ordinals))  # clean: near miss, the empty answer holds nothing and the others join the job
        if not extra:
            return False
        job.ordinals += extra
        return True

    # -- background ---------------------------------------------------

    def spawn(self, job: Job) -> threading.Thread:
        dev = self.desk.lease(wait=1.0)  # clean: handed to the thread, whose body surrenders in finally
        th = threading.Thread(target=self._body, args=(job, dev), daemon=True)
        th.start()
        return th

    def _body(self, job: Job, dev: int):
        try:
            job.fn(dev)
        except Exception as exc:
            job.error = exc
        finally:
            self.desk.surrender(dev)

    def benchmark(self, fns, repeats=3):
        times = []
        for fn in fns:
            dev = self.desk.lease(wait=1.0)  # leak: a function without a warmup is skipped by continue with the device still leased
            warm = getattr(fn, "warmup", None)
            if warm is None:
                continue
            warm(dev)
            t0 = time.perf_counter()
            for _ in range(repeats):
                fn(dev)
            times.append((time.perf_counter() - t0) / repeats)
            self.desk.surrender(dev)
        return times
