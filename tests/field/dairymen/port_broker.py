"""Ports, devices and worker processes of one elastic agent.

The agent starts one process per local rank.  All the ports come
from one PortBroker so that several jobs on a host do not collide.
"""
from __future__ import annotations

import errno
import heapq
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import IntEnum

logger = logging.getLogger("agent.ports")


class NoPort(RuntimeError):
    pass


class WorkerState(IntEnum):
    INIT = 0
    UP = 1
    FAILED = 2
    STOPPED = 3


class PortBroker:
    """Smallest free port first, so that firewalls need only a short range open."""

    def __init__(self, low: int, high: int):
        self._heap = list(range(low, high))
        heapq.heapify(self._heap)
        self._out: set[int] = set()
        self._quarantine: list[tuple[float, int]] = []
        self._mu = threading.Lock()

    def rent(self) -> int:
        with self._mu:
            self._parole()
            while self._heap:
                port = heapq.heappop(self._heap)  # clean: near miss, a busy one goes to quarantine and comes back from there
                if _busy(port):
                    self._quarantine.append((time.monotonic() + 60.0, port))
                    continue
                self._out.add(port)
                return port
        raise NoPort("all ports are taken")

    def hand_back(self, port: int) -> None:
        with self._mu:
            if port not in self._out:
                return
            self._out.discard(port)
            heapq.heappush(self._heap, port)

    def rent_block(self, n: int) -> list[int]:
        """n consecutive ports."""
        with self._mu:
            run: list[int] = []
            while self._heap and len(run) < n:
                port = heapq.heappop(self._heap)  # leak: a gap resets run and the ports that were popped before are not pushed again
                if run and port != run[-1] + 1:
                    run = []
                run.append(port)
            if len(run) < n:
                for port in run:
                    heapq.heappush(self._heap, port)
                raise NoPort(f"no {n} ports in a row")
            self._out.update(run)
            return run

    def _parole(self) -> None:
        now = time.monotonic()
        still = []
        for until, port in self._quarantine:
            if until <= now:
                heapq.heappush(self._heap, port)
            else:
                still.append((until, port))
        self._quarantine = still


def _busy(port: int) -> bool:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)  # clean: closed in finally
    try:
        s.bind(("", port))
        return False
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            logger.info("bind %d: %s", port, exc)
        return True
    finally:
        s.close()


def outbound_address(target: str = "10.255.255.255") -> str:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # leak: the OSError handler returns without closing it
    try:
        s.connect((target, 1))
        addr = s.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    s.close()
    return addr


@dataclass
class Worker:
    local_rank: int
    proc: subprocess.Popen | None = None
    debug_port: int | None = None
    state: WorkerState = WorkerState.INIT
    log: object = None

    def poll(self) -> int | None:
        if self.proc is None:
            return None
        rc = self.proc.poll()
        if rc is not None:
            self.state = WorkerState.FAILED if rc else WorkerState.STOPPED
        return rc


@dataclass
class WorkerGroup:
    broker: PortBroker
    size: int
    script: list[str]
    workers: list[Worker] = field(default_factory=list)
    master_port: int | None = None
    logdir: str = "/tmp"

    def start(self, world_size: int, base_rank: int) -> None:
        if self.master_port is None:
            self.master_port = self.broker.rent()  # clean: near miss, kept over restarts by the None-check and handed back in dissolve()
        for lr in range(self.size):
            w = Worker(lr)
            w.debug_port = self.broker.rent()  # leak: the worker is not in workers yet when launch() raises, start_safely() handles that
            self.launch(w, world_size, base_rank + lr)
            self.workers.append(w)

    def launch(self, w: Worker, world_size: int, rank: int) -> None:
        if not os.path.exists(self.script[0]):
            raise FileNotFoundError(self.script[0])
        env = dict(os.environ)
        env.update(
            RANK=str(rank),
            LOCAL_RANK=str(w.local_rank),
            WORLD_SIZE=str(world_size),
            MASTER_PORT=str(self.master_port),
            DEBUG_PORT=str(w.debug_port),
        )
        w.log = open(os.path.join(self.logdir, f"rank{rank}.log"), "ab")  # clean: the worker owns it and stop() closes it
        w.proc = subprocess.Popen([sys.executable, *self.script], env=env, stdout=w.log, stderr=w.log)  # clean: waited for in stop()
        w.state = WorkerState.UP

    def stop(self, grace: float = 10.0) -> None:
        for w in self.workers:
            if w.proc is not None and w.proc.poll() is None:
                w.proc.send_signal(signal.SIGTERM)
        limit = time.monotonic() + grace
        for w in self.workers:
            if w.proc is not None:
                try:
                    w.proc.wait(max(0.1, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    w.proc.kill()
                    w.proc.wait()
            if w.log is not None:
                w.log.close()
                w.log = None
            if w.debug_port is not None:
                self.broker.hand_back(w.debug_port)
                w.debug_port = None
        self.workers.clear()

    def dissolve(self) -> None:
        self.stop()
        if self.master_port is not None:
            self.broker.hand_back(self.master_port)
            self.master_port = None


def start_safely(group: WorkerGroup, world_size: int, base_rank: int) -> bool:
    try:
        group.start(world_size, base_rank)
        return True
    except (FileNotFoundError, NoPort) as exc:
        logger.error("group not started: %s", exc)
        group.dissolve()
        return False


class Sidecars:
    """Profilers and metric exporters, one port for each by name."""

    def __init__(self, broker: PortBroker):
        self.broker = broker
        self.by_name: dict[str, int] = {}

    def expose(self, name: str) -> int:
        port = self.broker.rent()  # leak: a name that is exposed twice loses its first port from the table
        self.by_name[name] = port
        return port

    def expose_once(self, name: str) -> int:
        if name not in self.by_name:
            self.by_name[name] = self.broker.rent()  # clean: only when the name is new, withdraw_all() hands it back
        return self.by_name[name]

    def withdraw_all(self) -> None:
        for port in self.by_name.values():
            self.broker.hand_back(port)
        self.by_name.clear()


def handshake(broker: PortBroker, peers: list[str], tries: int = 3) -> int | None:
    """Find a port that all the peers can reach; the caller hands it back."""
    for attempt in range(tries):
        port = broker.rent()  # leak: an unreachable port is replaced by the one of the next attempt and never handed back
        if all(_reachable(p, port) for p in peers):
            return port
        logger.info("port %d not reachable (attempt %d)", port, attempt)
    return None


def _reachable(host: str, port: int) -> bool:
    try:
        conn = socket.create_connection((host, port), timeout=1.0)  # clean: closed on the next line, an OSError means that there is none
        conn.close()
        return True
    except OSError:
        return False


def run_agent(group: WorkerGroup, sidecars: Sidecars, max_restarts: int) -> int:
    sidecars.expose_once("metrics")  # clean: near miss, the result is ignored but the table has it and withdraw_all() runs in finally
    try:
        while start_safely(group, group.size, 0):
            while all(w.poll() is None for w in group.workers):
                time.sleep(0.5)
            failed = [w for w in group.workers if w.state is WorkerState.FAILED]
            group.stop()
            if not failed:
                return 0
            max_restarts -= 1
            if max_restarts < 0:
                break
        return 1
    finally:
        group.dissolve()
        sidecars.withdraw_all()
