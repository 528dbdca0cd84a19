"""Simulator servers: each has a port and, some, a licence."""
from __future__ import annotations

import logging
from typing import Optional

from .licences import LicenceServer, PortRange

log = logging.getLogger("sim.servers")


class SimServer:
    def __init__(self, ports: PortRange, name: str) -> None:
        self.ports = ports
        self.name = name
        self.port: Optional[int] = ports.pick()  # clean: close() gives it back
        self.sent = 0

    def send(self, message: dict) -> int:
        self.sent += 1
        return len(message)

    def close(self) -> None:
        if self.port is not None:
            self.ports.give(self.port)
            self.port = None


class LicensedServer(SimServer):
    """close() returns both."""

    def __init__(self, ports: PortRange, licences: LicenceServer, name: str) -> None:
        super().__init__(ports, name)  # clean: close() calls the close() of the base
        self.licences = licences
        self.key = licences.check_out("physics")  # clean: close() checks it in

    def close(self) -> None:
        self.licences.check_in(self.key)
        super().close()


class RenderServer:
    """Renders on a port of its own, with a key for the renderer."""

    def __init__(self, ports: PortRange, licences: LicenceServer, name: str) -> None:
        self.ports, self.licences, self.name = ports, licences, name
        self.port = ports.pick()  # clean: close() gives it back
        self.key = licences.check_out("render")  # leak: close() gives the port only, not the key
        self.frames = 0

    def render(self, state: dict) -> bytes:
        self.frames += 1
        return repr(sorted(state)).encode()

    def close(self) -> None:
        if self.port is not None:
            self.ports.give(self.port)
            self.port = None
        log.info("%s rendered %d frames", self.name, self.frames)


class HybridServer:
    """Takes a licence only for contact-rich tasks."""

    def __init__(self, licences: LicenceServer, contact: bool) -> None:
        self.licences = licences
        self.contact = contact
        self.key: Optional[str] = None

    def open(self) -> None:
        if self.contact:
            self.key = self.licences.check_out("contact")  # clean: near miss, shut() asks the same flag

    def shut(self) -> None:
        if self.contact:
            self.licences.check_in(self.key)
            self.key = None


class SwitchServer:
    """The contact mode may be turned off during a run."""

    def __init__(self, licences: LicenceServer) -> None:
        self.licences = licences
        self.contact = False
        self.key: Optional[str] = None

    def enable(self) -> None:
        if not self.contact:
            self.contact = True
            self.key = self.licences.check_out("contact")  # leak: disable() clears the flag that shut() asks

    def disable(self) -> None:
        self.contact = False

    def shut(self) -> None:
        if self.contact:
            self.licences.check_in(self.key)
            self.contact = False


def ping(ports: PortRange, name: str) -> int:
    server = SimServer(ports, name)  # leak: never closed, the port stays picked
    n = server.send({"op": "ping"})
    log.debug("%s answered %d", name, n)
    return n
