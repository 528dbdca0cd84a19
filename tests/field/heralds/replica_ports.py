"""Local replicas of an inference server, and the ports they listen on.

Every copy of the server needs a port for traffic and most need a second one
for metrics.  The ports come from one range, which all of them share.
"""

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from typing import Callable, Dict, List, Optional, Set, Tuple

LOGGER = logging.getLogger("replicas")


class PortsExhausted(RuntimeError):
    pass


class LaunchError(RuntimeError):
    pass


class DuplicateName(ValueError):
    pass


def can_bind(port: int) -> bool:
    with contextlib.closing(socket.socket()) as sock:  # clean: closing()
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class PortRange:
    def __init__(self, first: int, last: int) -> None:
        self._lock = threading.Lock()
        self._available: Set[int] = set(range(first, last + 1))
        self._foreign: Dict[int, float] = {}

    def claim(self) -> int:
        with self._lock:
            self._recheck()
            while self._available:
                port = self._available.pop()  # clean: near miss, one used by a foreign process is noted in _foreign and comes back by _recheck
                if can_bind(port):
                    return port
                self._foreign[port] = time.monotonic()
        raise PortsExhausted()

    def claim_block(self, count: int) -> List[int]:
        """Return adjacent ports, for servers that count up by themselves."""
        with self._lock:
            for start in sorted(self._available):
                block = list(range(start, start + count))
                if all(p in self._available for p in block):
                    self._available.difference_update(block)  # clean: returned as a block
                    return block
        raise PortsExhausted()

    def surrender(self, port: int) -> None:
        with self._lock:
            self._available.add(port)

    def _recheck(self) -> None:
        limit = time.monotonic() - 60.0
        for port, since in list(self._foreign.items()):
            if since < limit:
                del self._foreign[port]
                self._available.add(port)


class Reservation:
    """A port that goes back unless it was committed."""

    def __init__(self, ports: PortRange) -> None:
        self.ports = ports
        self.committed = False
        self.port = ports.claim()  # clean: near miss, __exit__ surrenders it unless somebody committed, that is took over

    def __enter__(self) -> "Reservation":
        return self

    def commit(self) -> int:
        self.committed = True
        return self.port

    def __exit__(self, *exc_info: object) -> None:
        if not self.committed:
            self.ports.surrender(self.port)


class Replica:
    def __init__(self, name: str, ports: PortRange, port: int, metrics_port: Optional[int], argv: List[str]) -> None:
        self.name = name
        self.ports = ports
        self.port = port
        self.metrics_port = metrics_port
        self.argv = argv
        self.process: Optional[subprocess.Popen] = None

    def launch(self, patience: float = 60.0) -> None:
        env = dict(os.environ, SERVER_PORT=str(self.port))
        if self.metrics_port is not None:
            env["METRICS_PORT"] = str(self.metrics_port)
        self.process = subprocess.Popen(self.argv, env=env)  # clean: ended by kill(), also before a LaunchError unless it ended by itself
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise LaunchError(f"{self.name} exited with {self.process.returncode}")
            if self.healthy():
                return
            time.sleep(0.5)
        self.kill()
        raise LaunchError(f"{self.name} was not healthy after {patience}s")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1.0) as reply:  # clean: with block
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        self.kill()
        self.ports.surrender(self.port)


class Launcher:
    def __init__(self, ports: PortRange, argv: List[str]) -> None:
        self.ports = ports
        self.argv = argv
        self.replicas: Dict[str, Replica] = {}
        self.blocks: Dict[str, List[int]] = {}
        self._halt = threading.Event()
        self._upkeep = threading.Lock()

    def _register(self, replica: Replica) -> None:
        if replica.name in self.replicas:
            raise DuplicateName(replica.name)
        self.replicas[replica.name] = replica

    def start(self, name: str) -> Replica:
        if name in self.replicas:
            raise DuplicateName(name)
        port = self.ports.claim()  # leak: PortsExhausted for the metrics port leaves before there is a Replica
        metrics = self.ports.claim()  # leak: Replica.stop surrenders the traffic port only
        replica = Replica(name, self.ports, port, metrics, self.argv)
        try:
            replica.launch()
            self._register(replica)
        except (LaunchError, DuplicateName):
            replica.stop()
            raise
        return replica

    def start_plain(self, name: str) -> Replica:
        with Reservation(self.ports) as spot:  # clean: near miss, not committed when launch fails, later owned by the registered replica
            if name in self.replicas:
                raise DuplicateName(name)
            replica = Replica(name, self.ports, spot.port, None, self.argv)
            replica.launch()
            try:
                self._register(replica)
            except DuplicateName:
                replica.kill()
                raise
            spot.commit()
            return replica

    def start_canary(self, name: str, adopt: Callable[[Replica], None]) -> Replica:
        with Reservation(self.ports) as spot:  # leak: committed before launch, so neither __exit__ nor anybody else surrenders it after LaunchError
            replica = Replica(name, self.ports, spot.commit(), None, self.argv + ["--canary"])
            replica.launch()
            adopt(replica)
            return replica

    def start_patiently(self, name: str, attempts: int = 3) -> Optional[Replica]:
        for attempt in range(1, attempts + 1):
            port = self.ports.claim()  # leak: a failed launch kills the process and goes on with the next port
            replica = Replica(name, self.ports, port, None, self.argv)
            try:
                replica.launch()
            except LaunchError as exc:
                LOGGER.warning("attempt %d of %d: %s", attempt, attempts, exc)
                replica.kill()
                continue
            self.stop(name)
            self.replicas[name] = replica
            return replica
        return None

    def start_parallel(self, name: str, ranks: int) -> Tuple[List[int], List[subprocess.Popen]]:
        if name in self.blocks:
            raise DuplicateName(name)
        block = self.ports.claim_block(ranks)  # clean: near miss, kept under the name, stop_parallel surrenders each
        self.blocks[name] = block
        procs = []
        for rank, port in enumerate(block):
            procs.append(subprocess.Popen(self.argv + ["--rank", str(rank), "--port", str(port)]))  # clean: returned to the caller
        return block, procs

    def stop_parallel(self, name: str) -> None:
        for port in self.blocks.pop(name, []):
            self.ports.surrender(port)

    def run_bench(self, name: str, ranks: int) -> int:
        """Start a parallel server, wait for it, return the worst exit status."""
        _, procs = self.start_parallel(name, ranks)  # clean: processes waited for, block surrendered by the finally
        try:
            return max(proc.wait() for proc in procs)
        finally:
            self.stop_parallel(name)

    def stop(self, name: str) -> None:
        replica = self.replicas.pop(name, None)
        if replica is not None:
            replica.stop()

    def restart_dead(self) -> int:
        restarted = 0
        with self._upkeep:
            for name, replica in list(self.replicas.items()):
                if self._halt.is_set():
                    break
                if replica.process is None or replica.process.poll() is None:
                    continue
                self.stop(name)
                try:
                    self.start_plain(name)  # clean: near miss, the result is not kept here because start_plain registers it
                except (LaunchError, PortsExhausted) as exc:
                    LOGGER.error("restart of %s: %s", name, exc)
                    continue
                restarted += 1
        return restarted

    def watch(self, interval: float = 5.0) -> None:
        while not self._halt.wait(interval):
            self.restart_dead()

    def shutdown(self) -> None:
        self._halt.set()
        with self._upkeep:
            for name in list(self.replicas):
                self.stop(name)
            for name in list(self.blocks):
                self.stop_parallel(name)
