"""Launcher side: ports for rendezvous endpoints, host lock files, and the worker processes of one node."""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import random
import signal
import socket
import subprocess
import time
from typing import Iterator, Optional, Sequence

log = logging.getLogger("launch")


class PortBroker:
    """Ports of a range, marked as used for as long as somebody holds them."""

    def __init__(self, low: int, high: int, seed: int = 0) -> None:
        self._open = set(range(low, high))
        self._lent: dict[int, str] = {}
        self._rng = random.Random(seed)

    def acquire_port(self, purpose: str) -> Optional[int]:
        if not self._open:
            return None
        port = self._rng.choice(sorted(self._open))
        self._open.remove(port)
        self._lent[port] = purpose
        return port

    def release_port(self, port: int) -> None:
        self._lent.pop(port)
        self._open.add(port)

    def bindable(self, port: int) -> bool:
        probe = socket.socket()
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free = probe.connect_ex(("127.0.0.1", port)) != 0
        probe.close()
        return free

    def acquire_bindable(self, purpose: str, tries: int = 20) -> Optional[int]:
        """A port nobody outside of our books listens on."""
        refused: list[int] = []
        found = None
        for _ in range(tries):
            port = self.acquire_port(purpose)  # clean: near miss, refused ones are released after the loop
            if port is None:
                break
            if self.bindable(port):
                found = port
                break
            refused.append(port)
        for port in refused:
            self.release_port(port)
        return found

    def acquire_range(self, purpose: str, count: int) -> list[int]:
        """`count` ports or none."""
        ports: list[int] = []
        while len(ports) < count:
            port = self.acquire_port(purpose)  # clean: near miss, returned together or all released
            if port is None:
                while ports:
                    self.release_port(ports.pop())
                return []
            ports.append(port)
        return ports

    def acquire_above(self, floor: int, purpose: str) -> Optional[int]:
        """Some firewalls only pass high ports."""
        port = self.acquire_port(purpose)  # leak: rebound until high enough, low ones stay lent
        while port is not None and port < floor:
            log.debug("port %d is under %d", port, floor)
            port = self.acquire_port(purpose)  # leak: rebound until high enough, low ones stay lent
        return port


class HostLock:
    """One launcher per host and job."""

    def __init__(self, directory: str, job: str) -> None:
        self.path = os.path.join(directory, f"{job}.lock")
        self.handle = None

    def lock(self, patience: float = 0.0) -> bool:
        handle = open(self.path, "a+")  # clean: near miss, closed on failure, else unlock() closes it
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    handle.close()
                    return False
            time.sleep(0.05)
        self.handle = handle
        return True

    def unlock(self) -> None:
        if self.handle is not None:
            fcntl.flock(self.handle, fcntl.LOCK_UN)
            self.handle.close()
            self.handle = None


@dataclasses.dataclass
class Worker:
    rank: int
    port: int
    process: Optional[subprocess.Popen] = None
    log: Optional[object] = None
    restarts: int = 0


class Launcher:
    def __init__(self, broker: PortBroker, lock: HostLock, argv: Sequence[str], logs: str) -> None:
        self.broker = broker
        self.host_lock = lock
        self.argv = list(argv)
        self.logs = logs
        self.workers: dict[int, Worker] = {}
        self.master: Optional[int] = None
        self.debug_ports: list[int] = []

    def start(self, count: int) -> bool:
        if not self.host_lock.lock(patience=2.0):  # clean: unlocked when no master port, else by stop()
            return False
        self.master = self.broker.acquire_bindable("master")  # clean: near miss, stop() releases it
        if self.master is None:
            log.error("no port for the master")
            self.host_lock.unlock()
            return False
        for rank in range(count):
            self._spawn(rank)
        return True

    def _spawn(self, rank: int) -> bool:
        port = self.broker.acquire_bindable(f"rank{rank}")  # clean: near miss, reap() releases it
        if port is None:
            return False
        out = open(os.path.join(self.logs, f"rank{rank}.log"), "ab")  # clean: reap() closes it
        env = dict(os.environ, RANK=str(rank), MASTER_PORT=str(self.master), DATA_PORT=str(port))
        worker = Worker(rank, port, log=out)
        worker.process = subprocess.Popen(self.argv, env=env, stdout=out, stderr=subprocess.STDOUT)
        self.workers[rank] = worker
        return True

    def reap(self) -> list[int]:
        gone = []
        for rank, worker in list(self.workers.items()):
            if worker.process.poll() is None:
                continue
            del self.workers[rank]
            self.broker.release_port(worker.port)
            worker.log.close()
            gone.append(rank)
        return gone

    def respawn(self, worker: Worker) -> None:
        """A new process in the same worker record."""
        worker.process.send_signal(signal.SIGTERM)
        worker.process.wait()
        health = self.broker.acquire_port("health")  # leak: only put into the environment
        env = dict(os.environ, RANK=str(worker.rank), MASTER_PORT=str(self.master))
        env.update(DATA_PORT=str(worker.port), HEALTH_PORT=str(health or 0))
        worker.process = subprocess.Popen(self.argv, env=env, stdout=worker.log, stderr=subprocess.STDOUT)
        worker.restarts += 1

    def move(self, worker: Worker) -> bool:
        port = self.broker.acquire_bindable(f"rank{worker.rank}")  # clean: near miss, swapped, old released
        if port is None:
            return False
        port, worker.port = worker.port, port
        self.broker.release_port(port)
        return True

    def attach_debugger(self, rank: int) -> bool:
        port = self.broker.acquire_port("debug")  # leak: debug_ports are listed, and never released
        if port is None:
            return False
        self.debug_ports.append(port)
        self.workers[rank].process.send_signal(signal.SIGUSR1)
        return True

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.process.terminate()
        for worker in self.workers.values():
            worker.process.wait()
        self.reap()
        if self.master is not None:
            self.broker.release_port(self.master)
            self.master = None
        self.host_lock.unlock()


def host_is_free(directory: str, job: str) -> bool:
    guard = HostLock(directory, job)
    free = guard.lock()  # leak: the answer is returned, the lock taken for it stays
    log.info("%s: host %s", job, "free" if free else "busy")
    return free


def wait_for_host(directory: str, job: str, rounds: int) -> bool:
    """Whether the host became free within the rounds; does not keep it."""
    guard = HostLock(directory, job)
    for _ in range(rounds):
        if guard.lock(patience=1.0):  # clean: unlocked before the return
            guard.unlock()
            return True
        log.info("%s: host busy", job)
    return False


@contextlib.contextmanager
def rendezvous(broker: PortBroker, name: str) -> Iterator[Optional[str]]:
    port = broker.acquire_bindable(name)  # clean: released after the block when there was one
    try:
        yield None if port is None else f"tcp://{socket.gethostname()}:{port}"
    finally:
        if port is not None:
            broker.release_port(port)


def smoke_test(broker: PortBroker, argv: Sequence[str], ranks: int) -> int:
    """Run a tiny job to its end; the number of ranks that succeeded."""
    ports = broker.acquire_range("smoke", ranks)  # leak: too few ranks to run returns with the ports lent
    if ranks < 2:
        return 0
    with rendezvous(broker, "smoke") as where:  # clean: the manager releases it
        procs = [subprocess.Popen([*argv, f"--endpoint={where}", f"--port={p}"]) for p in ports]
        codes = [p.wait() for p in procs]
    for port in ports:
        broker.release_port(port)
    return codes.count(0)
