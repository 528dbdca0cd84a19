"""Node agent: hands out GPUs and ports to local workers and restarts them."""
from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

log = logging.getLogger("agent")


class GpuMask:
    """Bit i set: device i is free."""

    def __init__(self, count: int) -> None:
        self.mask = (1 << count) - 1
        self.lock = threading.Lock()

    def allot(self, n: int) -> List[int]:
        with self.lock:
            ids: List[int] = []
            i = 0
            while len(ids) < n and self.mask >> i:
                if self.mask >> i & 1:
                    ids.append(i)
                i += 1
            if len(ids) < n:
                return []
            for d in ids:
                self.mask &= ~(1 << d)
            return ids

    def reclaim(self, ids: Sequence[int]) -> None:
        with self.lock:
            for d in ids:
                self.mask |= 1 << d


class PortRange:
    def __init__(self, first: int, last: int) -> None:
        self.ports = set(range(first, last))

    def pick(self) -> Optional[int]:
        return self.ports.pop() if self.ports else None

    def unpick(self, port: int) -> None:
        self.ports.add(port)

    def pick_bindable(self) -> Optional[int]:
        while True:
            port = self.pick()  # leak: a port that cannot be bound now is not put back
            if port is None:
                return None
            s = socket.socket()  # clean: closed on both ways
            try:
                s.bind(("", port))
            except OSError:
                s.close()
                continue
            s.close()
            return port


@dataclass
class Job:
    name: str
    gpus: List[int]
    port: int
    proc: Optional[subprocess.Popen] = None
    restarts: int = 0
    debug_port: Optional[int] = None


class MaintenanceWindow:
    """Holds devices aside while the body runs."""

    def __init__(self, gpus: GpuMask, n: int) -> None:
        self.gpus = gpus
        self.n = n
        self.ids: List[int] = []
        self.started = 0.0

    def __enter__(self) -> "MaintenanceWindow":
        self.ids = self.gpus.allot(self.n)  # leak: __exit__ returns before the reclaim for a window of under a second
        self.started = time.monotonic()
        return self

    def __exit__(self, et, ev, tb) -> None:
        took = time.monotonic() - self.started
        if took < 1.0:
            log.info("window too short to record")
            return
        log.info("window took %.1fs", took)
        self.gpus.reclaim(self.ids)
        self.ids = []


class Reservation:
    def __init__(self, gpus: GpuMask, n: int) -> None:
        self.gpus = gpus
        self.ids = gpus.allot(n)  # clean: held in ids, __exit__ reclaims unless committed to a job

    def commit(self) -> List[int]:
        ids, self.ids = self.ids, []
        return ids

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exc) -> None:
        if not self.ids:
            return
        self.gpus.reclaim(self.ids)


class Agent:
    def __init__(self, gpus: GpuMask, ports: PortRange, log_dir: str) -> None:
        self.gpus = gpus
        self.ports = ports
        self.log_dir = log_dir
        self.jobs: Dict[str, Job] = {}
        self._mu = threading.Lock()

    def launch(self, name: str, cmd: List[str], n: int) -> bool:
        if name in self.jobs:
            return False
        ids = self.gpus.allot(n)  # leak: not reclaimed when no port is left
        if not ids:
            return False
        port = self.ports.pick()  # clean: moved into the job, which reap() retires
        if port is None:
            log.error("no port for %s", name)
            return False
        self.jobs[name] = Job(name, ids, port)
        self._spawn(self.jobs[name], cmd)
        return True

    def launch_reserved(self, name: str, cmd: List[str], n: int) -> bool:
        if name in self.jobs:
            return False
        with Reservation(self.gpus, n) as r:  # clean: near miss, committed to the job or reclaimed on exit
            if not r.ids:
                return False
            port = self.ports.pick()  # clean: moved into the job, which reap() retires
            if port is None:
                return False
            self.jobs[name] = Job(name, r.commit(), port)
        self._spawn(self.jobs[name], cmd)
        return True

    def _spawn(self, job: Job, cmd: List[str]) -> None:
        env = dict(os.environ, MASTER_PORT=str(job.port),
                   CUDA_VISIBLE_DEVICES=",".join(map(str, job.gpus)))
        with open(os.path.join(self.log_dir, job.name), "ab") as out:  # clean: closed by with
            job.proc = subprocess.Popen(cmd, env=env, stdout=out)

    def reap(self) -> List[str]:
        gone = []
        for name, job in list(self.jobs.items()):
            if job.proc.poll() is None:
                continue
            del self.jobs[name]
            self.gpus.reclaim(job.gpus)
            self.ports.unpick(job.port)
            if job.debug_port is not None:
                self.ports.unpick(job.debug_port)
            gone.append(name)
        return gone

    def restart(self, name: str, cmd: List[str]) -> bool:
        job = self.jobs[name]
        job.proc.kill()
        job.proc.wait()
        job.debug_port = self.ports.pick()  # leak: the next restart overwrites the port without putting it back
        job.restarts += 1
        self._spawn(job, cmd)
        return True

    def widen(self, name: str, extra: int) -> bool:
        more = self.gpus.allot(extra)  # clean: added to the job's devices, or reclaimed when the job is gone
        if not more:
            return False
        job = self.jobs.get(name)
        if job is None:
            self.gpus.reclaim(more)
            return False
        job.gpus.extend(more)
        return True

    def bandwidth_check(self, cmd: List[str]) -> Optional[float]:
        ids = self.gpus.allot(2)  # leak: not reclaimed when the tool prints nothing
        if not ids:
            return None
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(map(str, ids)))
        text = subprocess.run(cmd, env=env, capture_output=True, text=True).stdout
        if not text.strip():
            return None
        self.gpus.reclaim(ids)
        return float(text.split()[-1])

    def rename(self, old: str, new: str) -> bool:
        self._mu.acquire()  # leak: not released when the new name is in use
        if new in self.jobs:
            return False
        job = self.jobs.pop(old, None)
        if job is not None:
            job.name = new
            self.jobs[new] = job
        self._mu.release()
        return job is not None

    def snapshot(self) -> Dict[str, int]:
        self._mu.acquire()  # clean: released in finally
        try:
            return {name: job.restarts for name, job in self.jobs.items()}
        finally:
            self._mu.release()
