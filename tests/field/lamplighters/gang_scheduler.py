"""Gang scheduling of training jobs on a fixed inventory of accelerators."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Iterable

logger = logging.getLogger(__name__)


class InventoryEmpty(Exception):
    """Fewer accelerators are idle than were asked for."""


class SpecError(ValueError):
    """A job specification that can never be placed."""


class Phase(enum.Enum):
    PENDING = enum.auto()
    PLACED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


@dataclass(frozen=True)
class Device:
    node: str
    index: int
    memory_gb: int


@dataclass
class Job:
    name: str
    gpus: int
    priority: int = 0
    min_memory_gb: int = 0
    elastic: bool = False
    phase: Phase = Phase.PENDING
    devices: list[Device] = field(default_factory=list)
    borrowed: bool = False
    on_exit: list[Callable[[], None]] = field(default_factory=list)

    def validate(self) -> None:
        if self.gpus < 1:
            raise SpecError(f"{self.name}: needs at least one accelerator")
        if self.min_memory_gb > 192:
            raise SpecError(f"{self.name}: no such accelerator")


class Inventory:
    """Idle accelerators by node.  ``allot`` takes, ``reclaim`` puts back."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self._mutex = threading.RLock()
        self._idle: dict[str, list[Device]] = {}
        for dev in devices:
            self._idle.setdefault(dev.node, []).append(dev)

    def count(self) -> int:
        with self._mutex:
            return sum(map(len, self._idle.values()))

    def nodes(self) -> list[str]:
        with self._mutex:
            return [n for n, devs in self._idle.items() if devs]

    def allot(self, node: str | None = None) -> Device:
        with self._mutex:
            for name, devs in self._idle.items():
                if devs and node in (None, name):
                    return devs.pop()  # clean: returned to the caller
        raise InventoryEmpty(node or "any node")

    def allot_from(self, node: str, n: int) -> list[Device]:
        """Up to ``n`` accelerators of one node; possibly an empty list."""
        with self._mutex:
            devs = self._idle.get(node, [])
            taken, devs[:] = devs[:n], devs[n:]  # clean: returned as a list
            return taken

    def allot_gang(self, n: int, min_memory_gb: int) -> list[Device]:
        """``n`` accelerators with enough memory, or :class:`InventoryEmpty`."""
        gang: list[Device] = []
        with self._mutex:
            for devs in self._idle.values():
                while devs and len(gang) < n:
                    dev = devs.pop()  # leak: one with too little memory goes neither into the gang nor back
                    if dev.memory_gb < min_memory_gb:
                        continue
                    gang.append(dev)
            if len(gang) < n:
                for dev in gang:
                    self.reclaim(dev)
                raise InventoryEmpty(f"{n} x {min_memory_gb} GB")
        return gang

    def reclaim(self, dev: Device) -> None:
        with self._mutex:
            self._idle.setdefault(dev.node, []).append(dev)

    def reclaim_all(self, devs: Iterable[Device]) -> None:
        for dev in devs:
            self.reclaim(dev)


class PlacementRequest:
    """A job together with what it has been given so far."""

    _serial = itertools.count()

    def __init__(self, job: Job, inventory: Inventory) -> None:
        self.job = job
        self.inventory = inventory
        self.serial = next(self._serial)
        self.granted: list[Device] = []

    def __lt__(self, other: "PlacementRequest") -> bool:
        return (-self.job.priority, self.serial) < (-other.job.priority, other.serial)

    def top_up(self) -> bool:
        """Grab accelerators one by one; keeps what it got for the next round."""
        while len(self.granted) < self.job.gpus:
            try:
                self.granted.append(self.inventory.allot())  # clean: kept in granted, commit and cancel settle it
            except InventoryEmpty:
                return False
        return True

    def commit(self) -> None:
        self.job.devices, self.granted = self.granted, []
        self.job.phase = Phase.PLACED

    def cancel(self) -> None:
        while self.granted:
            self.inventory.reclaim(self.granted.pop())


class GangScheduler:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._pending: list[PlacementRequest] = []
        self._running: dict[str, Job] = {}

    # -- queue ------------------------------------------------------------
    def submit(self, job: Job) -> None:
        job.validate()
        heapq.heappush(self._pending, PlacementRequest(job, self.inventory))

    def tick(self) -> int:
        """One placement round; returns the number of jobs started."""
        started = 0
        waiting: list[PlacementRequest] = []
        while self._pending:
            req = heapq.heappop(self._pending)
            if req.job.name in self._running:
                req.cancel()
                continue
            if not req.top_up():
                waiting.append(req)
                break
            req.commit()
            self._launch(req.job)
            started += 1
        for req in waiting:
            heapq.heappush(self._pending, req)
        return started

    def _launch(self, job: Job) -> None:
        job.phase = Phase.RUNNING
        self._running[job.name] = job
        logger.info("%s on %d accelerators", job.name, len(job.devices))

    def finish(self, name: str) -> None:
        job = self._running.pop(name, None)
        if job is None:
            return
        while job.on_exit:
            job.on_exit.pop()()
        if not job.borrowed:
            self.inventory.reclaim_all(job.devices)
        job.devices, job.borrowed = [], False
        job.phase = Phase.DONE

    # -- immediate placement -------------------------------------------------
    def run_now(self, job: Job) -> bool:
        if job.name in self._running:
            return False
        try:
            job.devices = self.inventory.allot_gang(job.gpus, job.min_memory_gb)  # clean: the job is launched, finish reclaims
        except InventoryEmpty:
            return False
        self._launch(job)
        return True

    def run_checked(self, job: Job) -> bool:
        try:
            devs = self.inventory.allot_gang(job.gpus, job.min_memory_gb)  # leak: validate raises SpecError and the handler only logs
            job.validate()
        except (InventoryEmpty, SpecError) as exc:
            logger.warning("%s refused: %s", job.name, exc)
            return False
        if job.name in self._running:
            self.inventory.reclaim_all(devs)
            return False
        job.devices = devs
        self._launch(job)
        return True

    def run_spread(self, job: Job) -> bool:
        """One accelerator per node."""
        if job.name in self._running:
            return False
        devs: list[Device] = []
        for node in self.inventory.nodes():
            if len(devs) == job.gpus:
                break
            devs.extend(self.inventory.allot_from(node, 1))  # leak: too few nodes, returns False and drops the list
        if len(devs) < job.gpus:
            return False
        job.devices = devs
        self._launch(job)
        return True

    # -- elasticity -----------------------------------------------------------

    def migrate(self, name: str, node: str) -> bool:
        job = self._running.get(name)
        if job is None or job.borrowed:
            return False
        fresh: list[Device] = []
        try:
            for _ in job.devices:
                fresh.append(self.inventory.allot(node))  # clean: the handler reclaims the part, otherwise the job takes it
        except InventoryEmpty:
            self.inventory.reclaim_all(fresh)
            return False
        old, job.devices = job.devices, fresh
        self.inventory.reclaim_all(old)
        return True

    def attach(self, host: str, guest: Job) -> bool:
        """Run ``guest`` on the accelerators of ``host``, plus one if it is elastic."""
        owner = self._running.get(host)
        if owner is None or guest.name in self._running:
            return False
        guest.borrowed = True
        guest.devices = list(owner.devices)
        if guest.elastic:
            try:
                guest.devices.append(self.inventory.allot())  # leak: finish skips reclaim for a borrowed job
            except InventoryEmpty:
                logger.debug("no extra accelerator for %s", guest.name)
        self._launch(guest)
        return True

    def lend_monitor(self, name: str) -> Device | None:
        """An extra accelerator for the profiler, gone when the job exits."""
        job = self._running.get(name)
        if job is None:
            return None
        try:
            dev = self.inventory.allot()  # clean: the exit hook reclaims it
        except InventoryEmpty:
            return None
        job.on_exit.append(lambda: self.inventory.reclaim(dev))
        return dev
