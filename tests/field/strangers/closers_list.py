"""Objects that register their own cleanup with an owner."""
from __future__ import annotations

from typing import Callable


class PortRange:
    def __init__(self, first: int, last: int) -> None:
        self._ports = list(range(first, last))

    def take_port(self) -> int:
        return self._ports.pop()

    def give_port(self, port: int) -> None:
        self._ports.append(port)


class Owner:
    def __init__(self) -> None:
        self._closers: list[Callable[[], None]] = []

    def on_close(self, fn: Callable[[], None]) -> None:
        self._closers.append(fn)

    def close(self) -> None:
        for fn in reversed(self._closers):
            fn()
        self._closers.clear()


class Worker(Owner):
    def __init__(self, ports: PortRange) -> None:
        super().__init__()
        self.ports = ports
        self.port = ports.take_port()  # clean: near miss, registered with on_close
        self.on_close(lambda: ports.give_port(self.port))


class DoubleWorker(Worker):
    def __init__(self, ports: PortRange) -> None:
        super().__init__(ports)
        self.second = ports.take_port()  # clean: near miss, a bound method registered with on_close gives it back
        self.on_close(self._give_second)

    def _give_second(self) -> None:
        self.ports.give_port(self.second)


class RestartableWorker(Owner):
    def __init__(self, ports: PortRange) -> None:
        super().__init__()
        self.ports = ports
        self.port = -1

    def start(self) -> int:
        self.port = self.ports.take_port()  # leak: restart clears the closers without running them
        port = self.port
        self.on_close(lambda: self.ports.give_port(port))
        return port

    def restart(self) -> int:
        self._closers.clear()
        return self.start()


def run_worker(ports: PortRange, job) -> int:
    worker = Worker(ports)
    try:
        return job(worker.port)
    finally:
        worker.close()


def find_port(ports: PortRange, usable: Callable[[int], bool]) -> int | None:
    rejected = []
    found = None
    while found is None and len(rejected) < 8:
        port = ports.take_port()  # clean: near miss, rejected ones go back, the found one is returned
        if usable(port):
            found = port
        else:
            rejected.append(port)
    for port in rejected:
        ports.give_port(port)
    return found


def find_port_fast(ports: PortRange, usable: Callable[[int], bool]) -> int | None:
    for _ in range(8):
        port = ports.take_port()  # leak: rejected ones are not given back
        if usable(port):
            return port
    return None


def check_port(ports: PortRange, usable: Callable[[int], bool]) -> bool:
    port = find_port(ports, usable)  # clean: near miss, given back unless none
    if port is None:
        return False
    ports.give_port(port)
    return True


def check_port_fast(ports: PortRange, usable: Callable[[int], bool]) -> bool:
    return find_port_fast(ports, usable) is not None  # leak: compared to none and dropped
