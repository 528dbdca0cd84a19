"""Ports and process slots for model runner processes started on demand."""
from __future__ import annotations

import logging
import socket
import subprocess
import threading
from dataclasses import dataclass

log = logging.getLogger("runners")


class PortRange:
    def __init__(self, first: int, last: int) -> None:
        self._lock = threading.Lock()
        self._ports = set(range(first, last))
        self._lent: dict[int, str] = {}

    def reserve(self, owner: str) -> int:
        """A port for the owner, 0 when none is left."""
        with self._lock:
            if not self._ports:
                return 0
            port = min(self._ports)
            self._ports.remove(port)  # clean: written down and handed to the caller
            self._lent[port] = owner
            return port

    def reserve_bindable(self, owner: str) -> int:
        with self._lock:
            while self._ports:
                port = self._ports.pop()  # leak: a port that cannot be bound just now never goes back to the set
                if self._bindable(port):
                    self._lent[port] = owner
                    return port
        return 0

    @staticmethod
    def _bindable(port: int) -> bool:
        probe = socket.socket()  # clean: near miss, closed by the finally on both answers
        try:
            probe.bind(("127.0.0.1", port))
            return True
        except OSError:
            return False
        finally:
            probe.close()

    def vacate(self, port: int) -> None:
        with self._lock:
            if self._lent.pop(port, None) is not None:
                self._ports.add(port)


@dataclass
class Runner:
    model: str
    port: int
    process: subprocess.Popen | None = None
    admin_port: int = 0


def wait_ready(port: int, tries: int = 20) -> bool:
    for _ in range(tries):
        try:
            conn = socket.create_connection(("127.0.0.1", port), timeout=0.2)  # leak: a greeting other than READY goes round without close
        except OSError:
            continue
        if conn.recv(5) == b"READY":
            conn.close()
            return True
    return False


class RunnerTable:
    def __init__(self, ports: PortRange, command: list[str]) -> None:
        self._ports = ports
        self._command = command
        self._runners: dict[str, Runner] = {}

    def start(self, model: str) -> Runner | None:
        if model in self._runners:
            return self._runners[model]
        port = self._ports.reserve(model)  # leak: a runner that does not come up is terminated and its port forgotten
        if not port:
            return None
        process = subprocess.Popen([*self._command, model, str(port)])  # clean: near miss, waited for on failure, else tabled and stopped by stop
        if not wait_ready(port):
            process.terminate()
            process.wait()
            return None
        runner = Runner(model, port, process)
        self._runners[model] = runner
        return runner

    def adopt(self, model: str, process: subprocess.Popen) -> Runner | None:
        port = self._ports.reserve_bindable(model)  # clean: near miss, vacated when the model is already tabled
        if not port:
            return None
        if model in self._runners:
            self._ports.vacate(port)
            return None
        runner = Runner(model, port, process)
        self._runners[model] = runner
        return runner

    def add_admin(self, runner: Runner) -> int:
        if not runner.admin_port:
            runner.admin_port = self._ports.reserve(f"{runner.model}/admin")  # leak: stop vacates the serving port only
        return runner.admin_port

    def stop(self, model: str) -> None:
        runner = self._runners.pop(model, None)
        if runner is None:
            return
        if runner.process is not None:
            runner.process.terminate()
            runner.process.wait()
        self._ports.vacate(runner.port)

    def port_pair(self, model: str) -> tuple[int, int] | None:
        """Two ports for the caller, or nothing."""
        first = self._ports.reserve(model)  # clean: near miss, vacated when the second is 0, else in the tuple
        second = self._ports.reserve(model)  # clean: in the tuple
        if not second:
            self._ports.vacate(first)
            return None
        return first, second

    def self_test(self, model: str) -> bool:
        pair = self.port_pair(model)  # clean: both vacated
        if pair is None:
            return False
        low, high = pair
        distinct = low != high
        self._ports.vacate(low)
        self._ports.vacate(high)
        return distinct

    def bench(self, models: list[str]) -> dict[str, float]:
        results: dict[str, float] = {}
        for model in models:
            port = self._ports.reserve(f"bench/{model}")  # leak: a model already measured is skipped with the port reserved
            if not port:
                break
            if model in results:
                continue
            done = subprocess.run([*self._command, "--bench", model, str(port)], capture_output=True, check=False)
            results[model] = float(done.stdout or 0)
            self._ports.vacate(port)
        return results

    def reachable(self, model: str) -> bool:
        runner = self._runners.get(model)
        if runner is None:
            return False
        with socket.create_connection(("127.0.0.1", runner.port)) as conn:  # clean: with
            return conn.recv(1) != b""
