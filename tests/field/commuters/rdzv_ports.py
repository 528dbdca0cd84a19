"""Rendezvous ports for torchrun jobs: a range of ports, plus the sockets that guard them."""
from __future__ import annotations

import contextlib
import random
import socket
import subprocess
from dataclasses import dataclass, field
from typing import Iterator, Optional


class PortRange:
    def __init__(self, low: int, high: int) -> None:
        self._unused: set[int] = set(range(low, high))
        self._rng = random.Random(low)

    def draw(self) -> Optional[int]:
        if not self._unused:
            return None
        port = self._rng.choice(sorted(self._unused))
        self._unused.discard(port)  # clean: returned to the caller
        return port

    def draw_run(self, length: int) -> list[int]:
        """`length` consecutive ports, or nothing."""
        for start in sorted(self._unused):
            run = range(start, start + length)
            if all(p in self._unused for p in run):
                self._unused.difference_update(run)  # clean: the whole run is returned
                return list(run)
        return []

    def give(self, port: int) -> None:
        self._unused.add(port)


@dataclass
class TrainJob:
    name: str
    ranks: int
    port: Optional[int] = None
    proc: Optional["subprocess.Popen[bytes]"] = None
    side_ports: list[int] = field(default_factory=list)


class JobLauncher:
    def __init__(self, ports: PortRange) -> None:
        self.ports = ports
        self.jobs: dict[str, TrainJob] = {}

    def _draw_bindable(self) -> Optional[int]:
        for _ in range(20):
            port = self.ports.draw()  # leak: a port somebody else listens on is dropped for the next
            if port is None:
                return None
            if is_bindable(port):
                return port
        return None

    def _draw_verified(self) -> Optional[int]:
        rejected: list[int] = []
        chosen = None
        while chosen is None:
            port = self.ports.draw()  # clean: near miss, the rejected are given back before returning
            if port is None:
                break
            if is_bindable(port):
                chosen = port
            else:
                rejected.append(port)
        for port in rejected:
            self.ports.give(port)
        return chosen

    def launch(self, job: TrainJob, cmd: list[str]) -> bool:
        if job.name in self.jobs:
            return False
        job.port = self._draw_verified()  # clean: belongs to the job, reap gives it
        if job.port is None:
            return False
        job.proc = subprocess.Popen(cmd + [f"--rdzv-endpoint=localhost:{job.port}"])  # clean: the job keeps the process, reap collects it when it has ended
        self.jobs[job.name] = job
        return True

    def restart(self, name: str, cmd: list[str]) -> bool:
        job = self.jobs[name]
        if job.proc is not None:
            job.proc.terminate()
            job.proc.wait()
        port = self._draw_verified()  # leak: the job's earlier port is overwritten
        if port is None:
            return False
        job.port = port
        job.proc = subprocess.Popen(cmd + [f"--rdzv-endpoint=localhost:{port}"])  # clean: near miss, the former process was terminated and waited for first
        return True

    def add_metrics_ports(self, name: str) -> bool:
        job = self.jobs.get(name)
        run = self.ports.draw_run(job.ranks if job else 1)  # leak: drawn also for a job that does not exist
        if not run or job is None:
            return False
        job.side_ports.extend(run)
        return True

    def reap(self) -> int:
        gone = 0
        for name in list(self.jobs):
            job = self.jobs[name]
            if job.proc is not None and job.proc.poll() is None:
                continue
            del self.jobs[name]
            if job.port is not None:
                self.ports.give(job.port)
            for p in job.side_ports:
                self.ports.give(p)
            gone += 1
        return gone


def is_bindable(port: int) -> bool:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)  # clean: near miss, closed in the finally on both answers
    try:
        s.bind(("", port))
        return True
    except OSError:
        return False
    finally:
        s.close()


def ping(port: int, timeout: float) -> bool:
    try:
        s = socket.create_connection(("localhost", port), timeout)  # leak: a wrong greeting returns with the socket open
    except OSError:
        return False
    if s.recv(4) != b"RDZV":
        return False
    s.close()
    return True


@contextlib.contextmanager
def temporary_port(ports: PortRange) -> Iterator[int]:
    port = ports.draw()  # clean: given back in the finally
    if port is None:
        raise RuntimeError("no port")
    try:
        yield port
    finally:
        ports.give(port)


def smoke(ports: PortRange, cmd: list[str]) -> int:
    with temporary_port(ports) as port:  # clean: context manager
        return subprocess.call(cmd + [str(port)])
