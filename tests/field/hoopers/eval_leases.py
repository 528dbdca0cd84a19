"""Evaluation jobs on a shared box: device leases, detached runs and pipelines."""
from __future__ import annotations

import heapq
import logging
import subprocess
import threading
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

log = logging.getLogger("evals")

class LeaseTimeout(Exception): pass
class PoolClosed(Exception): pass
class OutOfMemory(Exception): pass
class PeerAccessError(Exception): pass

@dataclass
class Lease:
    pool: "DevicePool"
    devices: Tuple[int, ...]
    tag: str = ""
    released: bool = False

    @property
    def n(self) -> int:
        return len(self.devices)

    def release(self) -> None:
        if self.released:
            return
        self.released = True
        self.pool._return(self.devices)

    def split(self, k: int) -> "Lease":
        """Hand k devices to a lease of their own."""
        mine, other = self.devices[:-k], self.devices[-k:]
        self.devices = mine
        return Lease(self.pool, other, self.tag + "/split")

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc) -> None:
        self.release()

class DevicePool:
    def __init__(self, count: int) -> None:
        self._free: List[int] = list(range(count))
        heapq.heapify(self._free)
        self._cv = threading.Condition()
        self._closed = False

    def lease(self, n: int, timeout: Optional[float] = None, tag: str = "") -> Lease:
        with self._cv:
            ok = self._cv.wait_for(lambda: self._closed or len(self._free) >= n, timeout)
            if self._closed:
                raise PoolClosed()
            if not ok:
                raise LeaseTimeout(f"{tag}: {n} devices")
            picked = [heapq.heappop(self._free) for _ in range(n)]  # clean: handed out in the Lease
            return Lease(self, tuple(picked), tag)

    def try_lease(self, n: int, tag: str = "") -> Optional[Lease]:
        with self._cv:
            if self._closed or len(self._free) < n:
                return None
            picked = tuple(heapq.heappop(self._free) for _ in range(n))  # clean: handed out in the Lease
        return Lease(self, picked, tag)

    def lease_contiguous(self, n: int, tag: str = "") -> Optional[Lease]:
        with self._cv:
            picked: List[int] = []
            while self._free and len(picked) < n:
                dev = heapq.heappop(self._free)  # leak: at a gap the devices of the broken run are thrown away
                if picked and dev != picked[-1] + 1:
                    picked = []
                picked.append(dev)
            if len(picked) < n:
                for dev in picked:
                    heapq.heappush(self._free, dev)
                return None
            return Lease(self, tuple(picked), tag)

    def _return(self, devices: Tuple[int, ...]) -> None:
        with self._cv:
            for dev in devices:
                heapq.heappush(self._free, dev)
            self._cv.notify_all()

    def close(self) -> None:
        with self._cv:
            self._closed = True
            self._cv.notify_all()

@dataclass
class Job:
    job_id: str
    argv: List[str]
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    on_done: Optional[Callable[["Job", int], None]] = None

@dataclass
class RunningJob:
    job: Job
    lease: Lease
    proc: subprocess.Popen

@dataclass
class PipelineGroup:
    stages: List[Lease]

    def peers(self) -> List[Tuple[int, int]]:
        return [(a.devices[-1], b.devices[0]) for a, b in zip(self.stages, self.stages[1:])]

    def close(self) -> None:
        for lease in self.stages:
            lease.release()
        self.stages = []

class JobRunner:
    def __init__(self, pool: DevicePool, executor) -> None:
        self.pool = pool
        self.executor = executor
        self._running: Dict[str, RunningJob] = {}
        self._lock = threading.Lock()
        self._queue: List[Job] = []
        self._stop = threading.Event()

    def run(self, job: Job) -> int:
        with self.pool.lease(job.gpus, tag=job.job_id) as lease:  # clean: with statement
            return self.executor.execute(job, lease.devices)

    def run_growing(self, job: Job) -> int:
        lease = self.pool.lease(job.gpus, tag=job.job_id)  # leak: OutOfMemory puts a larger lease over this one
        try:
            for _ in range(3):
                try:
                    return self.executor.execute(job, lease.devices)
                except OutOfMemory:
                    log.info("%s does not fit on %d devices", job.job_id, lease.n)
                    lease = self.pool.lease(lease.n * 2, timeout=600, tag=job.job_id)  # leak: the second OutOfMemory overwrites it in turn
            return 1
        finally:
            lease.release()

    def run_pair(self, judge: Job, model: Job) -> Tuple[int, int]:
        lease = self.pool.lease(judge.gpus + model.gpus, tag=model.job_id)  # clean: with statement below
        with lease:
            half = lease.split(judge.gpus)  # clean: near miss, released in the finally, the rest by the with
            try:
                a = self.executor.execute(model, lease.devices)
                b = self.executor.execute(judge, half.devices)
            finally:
                half.release()
            return a, b

    def enqueue(self, job: Job) -> None:
        with self._lock:
            self._queue.append(job)
            self._queue.sort(key=lambda j: -j.gpus)

    def dispatch_forever(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                job = self._queue.pop(0) if self._queue else None
            if job is None:
                self._stop.wait(0.5)
                continue
            lease = self.pool.try_lease(job.gpus, tag=job.job_id)  # clean: near miss, the thread that is started owns it
            if lease is None:
                self.enqueue(job)
                self._stop.wait(0.2)
                continue
            threading.Thread(target=self._work, args=(job, lease), name=job.job_id, daemon=True).start()

    def _work(self, job: Job, lease: Lease) -> None:
        rc = 1
        try:
            rc = self.executor.execute(job, lease.devices)
        finally:
            lease.release()
        if job.on_done is not None:
            job.on_done(job, rc)

    def start_detached(self, job: Job) -> bool:
        if job.job_id in self._running:
            return False
        lease = self.pool.try_lease(job.gpus, tag=job.job_id)  # leak: cancel() kills the process and forgets the lease of its entry
        if lease is None:
            return False
        try:
            proc = subprocess.Popen(job.argv, env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, lease.devices))})  # clean: kept in _running, reap() and cancel() wait for it
        except OSError:
            lease.release()
            return False
        with self._lock:
            self._running[job.job_id] = RunningJob(job, lease, proc)
        return True

    def cancel(self, job_id: str) -> bool:
        with self._lock:
            entry = self._running.pop(job_id, None)
        if entry is None:
            return False
        if entry.proc.poll() is None:
            entry.proc.kill()
        entry.proc.wait()
        return True

    def reap(self) -> int:
        with self._lock:
            done = [r for r in self._running.values() if r.proc.poll() is not None]
            for entry in done:
                del self._running[entry.job.job_id]
        for entry in done:
            entry.lease.release()
            if entry.job.on_done is not None:
                entry.job.on_done(entry.job, entry.proc.returncode)
        return len(done)

    def build_group(self, tp: int, pp: int) -> Optional[PipelineGroup]:
        stages: List[Lease] = []
        for index in range(pp):
            lease = self.pool.lease_contiguous(tp, tag=f"stage{index}")  # clean: near miss, the stages hold them and are unwound when one is missing
            if lease is None:
                for stage in stages:
                    stage.release()
                return None
            stages.append(lease)
        return PipelineGroup(stages)

    def calibrate(self, job: Job) -> Optional[int]:
        group = self.build_group(job.tp, job.pp)  # leak: PeerAccessError leaves before the try
        if group is None:
            return None
        for a, b in group.peers():
            if not self.executor.can_access(a, b):
                raise PeerAccessError(f"{a} -> {b}")
        try:
            return self.executor.execute(job, tuple(d for s in group.stages for d in s.devices))
        finally:
            group.close()

    def smoke(self, job: Job) -> bool:
        group = self.build_group(1, job.pp)  # clean: both branches close it
        if group is None:
            return False
        if len(group.peers()) == 0:
            group.close()
            return self.run(job) == 0
        ok = all(self.executor.can_access(a, b) for a, b in group.peers())
        group.close()
        return ok
