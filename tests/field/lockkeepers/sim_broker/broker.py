"""Keeps the servers of all workers."""
from __future__ import annotations

import logging
import threading
from typing import Dict, List, Optional

from .licences import LicenceServer, PortRange
from .servers import LicensedServer, SimServer

log = logging.getLogger("sim.broker")


class Broker:
    def __init__(self, ports: PortRange, licences: LicenceServer) -> None:
        self.ports, self.licences = ports, licences
        self.assigned: Dict[str, SimServer] = {}
        self.idle: List[LicensedServer] = []
        self._mutex = threading.Lock()

    def assign(self, worker: str, physics: bool) -> SimServer:
        with self._mutex:
            known = self.assigned.get(worker)
            if known is not None:
                return known
            if physics:
                server: SimServer = LicensedServer(self.ports, self.licences, worker)  # clean: dismiss()
            else:
                server = SimServer(self.ports, worker)  # clean: dismiss() closes it
            self.assigned[worker] = server
            return server

    def dismiss(self, worker: str) -> None:
        with self._mutex:
            server = self.assigned.pop(worker, None)
        if server is not None:
            server.close()

    def stop(self) -> None:
        for worker in list(self.assigned):
            self.dismiss(worker)
        with self._mutex:
            while self.idle:
                self.idle.pop().close()

    def borrow_idle(self) -> LicensedServer:
        """Back with return_idle()."""
        with self._mutex:
            if self.idle:
                return self.idle.pop()
        return LicensedServer(self.ports, self.licences, "idle")  # clean: near miss, handed over

    def return_idle(self, server: LicensedServer) -> None:
        with self._mutex:
            if len(self.idle) < 4:
                self.idle.append(server)
                return
        server.close()

    def step_idle(self, message: dict) -> int:
        server = self.borrow_idle()  # clean: returned after the send
        n = server.send(message)
        self.return_idle(server)
        return n


def even_port(ports: PortRange, tries: int) -> Optional[int]:
    """The debugger wants an even port."""
    odd: List[int] = []
    found: Optional[int] = None
    for _ in range(tries):
        port = ports.pick()  # clean: near miss, the odd ones are collected and given back
        if port is None:
            break
        if port % 2 == 0:
            found = port
            break
        odd.append(port)
    for port in odd:
        ports.give(port)
    return found


def high_port(ports: PortRange, floor: int) -> Optional[int]:
    port = ports.pick()  # leak: a port under the floor is replaced by the next one and not given back
    while port is not None and port < floor:
        log.debug("port %d is too low", port)
        port = ports.pick()  # leak: as above, the loop rebinds the name
    return port
