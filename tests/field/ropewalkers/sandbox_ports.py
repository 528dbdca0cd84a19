"""Preview environments: each gets ports, a scratch volume and a place on a host."""
from __future__ import annotations

import logging
import random
import subprocess
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

log = logging.getLogger("preview")


class PortAllocator:
    def __init__(self, low: int, high: int) -> None:
        self._avail = set(range(low, high))
        self._mu = threading.Lock()

    def reserve(self) -> int | None:
        with self._mu:
            return self._avail.pop() if self._avail else None

    def reserve_exact(self, port: int) -> bool:
        with self._mu:
            if port not in self._avail:
                return False
            self._avail.remove(port)
            return True

    def relinquish(self, port: int) -> None:
        with self._mu:
            self._avail.add(port)

    def reserve_bindable(self, tries: int = 10) -> int | None:
        """A port which nothing outside our books listens on."""
        for _ in range(tries):
            port = self.reserve()  # clean: near miss, relinquished when it cannot be bound
            if port is None:
                return None
            if can_bind(port):
                return port
            self.relinquish(port)
        return None

    def reserve_even(self) -> int | None:
        """RTP wants an even port."""
        while True:
            port = self.reserve()  # leak: odd ports are taken out and not put back
            if port is None or port % 2 == 0:
                return port

    def reserve_run(self, n: int) -> list[int]:
        got: list[int] = []
        for _ in range(n):
            port = self.reserve()  # clean: all relinquished when there are too few
            if port is None:
                for p in got:
                    self.relinquish(p)
                return []
            got.append(port)
        return got


def can_bind(port: int) -> bool:
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return all(int(line.split()[1].rpartition(":")[2], 16) != port for line in listening)


class State(Enum):
    STARTING = 1
    RUNNING = 2
    FAILED = 3
    STOPPED = 4


@dataclass(eq=False)
class Volume:
    path: str
    gigabytes: int


class VolumeStore:
    def __init__(self, capacity_gb: int) -> None:
        self.left = capacity_gb
        self.mounted: list[Volume] = []

    def carve(self, name: str, gigabytes: int) -> Volume | None:
        if gigabytes > self.left:
            return None
        self.left -= gigabytes
        vol = Volume(f"/srv/preview/{name}", gigabytes)
        self.mounted.append(vol)
        return vol

    def wipe(self, vol: Volume) -> None:
        self.mounted.remove(vol)
        self.left += vol.gigabytes


@dataclass
class Sandbox:
    name: str
    image: str
    http_port: int
    volume: Volume | None = None
    debug_port: int | None = None
    rtp_port: int | None = None
    state: State = State.STARTING
    proc: subprocess.Popen | None = None
    labels: dict[str, str] = field(default_factory=dict)


class Fleet:
    def __init__(self, ports: PortAllocator, volumes: VolumeStore) -> None:
        self.ports = ports
        self.volumes = volumes
        self.boxes: dict[str, Sandbox] = {}

    def create(self, name: str, image: str, gigabytes: int) -> Sandbox | None:
        if name in self.boxes:
            return None
        port = self.ports.reserve_bindable()  # leak: not relinquished when the disk is full
        if port is None:
            return None
        volume = self.volumes.carve(name, gigabytes)  # clean: moves into the sandbox, wiped by destroy
        if volume is None:
            log.error("no space for %s", name)
            return None
        box = Sandbox(name, image, port, volume)
        self.boxes[name] = box
        return box

    def attach_debugger(self, name: str) -> int | None:
        box = self.boxes[name]
        if box.debug_port is not None:
            return box.debug_port
        box.debug_port = self.ports.reserve()  # clean: near miss, destroy relinquishes it
        return box.debug_port

    def attach_media(self, name: str) -> int | None:
        box = self.boxes[name]
        if box.rtp_port is None:
            box.rtp_port = self.ports.reserve_even()  # leak: destroy does not know about the rtp port
        return box.rtp_port

    def start(self, name: str) -> bool:
        box = self.boxes[name]
        args = ["preview-run", "--port", str(box.http_port), box.image]
        if box.debug_port is not None:
            args += ["--debug", str(box.debug_port)]
        if box.rtp_port is not None:
            args += ["--rtp", str(box.rtp_port)]
        box.proc = subprocess.Popen(args)
        box.state = State.RUNNING
        return box.proc.poll() is None

    def destroy(self, name: str) -> None:
        box = self.boxes.pop(name)
        if box.proc is not None:
            box.proc.terminate()
        self.ports.relinquish(box.http_port)
        if box.debug_port is not None:
            self.ports.relinquish(box.debug_port)
        if box.volume is not None:
            self.volumes.wipe(box.volume)
        box.state = State.STOPPED

    def resize(self, name: str, gigabytes: int) -> bool:
        """A new volume in place of the old one."""
        box = self.boxes[name]
        new = self.volumes.carve(name, gigabytes)  # clean: takes the place of the one that is wiped
        if new is None:
            return False
        if box.volume is not None:
            self.volumes.wipe(box.volume)
        box.volume = new
        return True

    def pin_port(self, name: str, port: int) -> bool:
        """The customer wants a certain port."""
        box = self.boxes[name]
        if not self.ports.reserve_exact(port):  # clean: relinquished, or put in place of the old one
            return False
        if not can_bind(port):
            self.ports.relinquish(port)
            return False
        self.ports.relinquish(box.http_port)
        box.http_port = port
        return True


class Smoke:
    """Short lived boxes for smoke tests, outside the fleet's table."""

    def __init__(self, ports: PortAllocator, volumes: VolumeStore) -> None:
        self.ports = ports
        self.volumes = volumes

    def check_pair(self, image: str, peers: int) -> int:
        ports = self.ports.reserve_run(peers)  # leak: stops at the first failure with the rest reserved
        passed = 0
        while ports:
            port = ports.pop()
            code = subprocess.call(["preview-run", "--once", "--port", str(port), image])
            self.ports.relinquish(port)
            if code != 0:
                log.warning("%s fails on port %d", image, port)
                return passed
            passed += 1
        return passed

    def shuffle_check(self, image: str, peers: int) -> int:
        ports = self.ports.reserve_run(peers)  # clean: near miss, the rest goes back after the break
        random.shuffle(ports)
        passed = 0
        while ports:
            port = ports.pop()
            code = subprocess.call(["preview-run", "--once", "--port", str(port), image])
            self.ports.relinquish(port)
            if code != 0:
                break
            passed += 1
        for port in ports:
            self.ports.relinquish(port)
        return passed
