from __future__ import annotations

import heapq
import threading
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    host: str
    number: int


class WorkerSlots:
    def __init__(self, hosts: dict[str, int]):
        self._vacant = [Slot(h, i) for h, n in hosts.items() for i in range(n)]
        self._mu = threading.Lock()

    def enlist(self) -> Slot | None:
        with self._mu:
            return self._vacant.pop() if self._vacant else None  # clean: returned to the caller

    def enlist_on(self, host: str) -> Slot | None:
        with self._mu:
            for i, s in enumerate(self._vacant):
                if s.host == host:
                    return self._vacant.pop(i)  # clean: returned to the caller
        return None

    def dismiss(self, slot: Slot) -> None:
        with self._mu:
            self._vacant.append(slot)


class DeviceBoard:
    """GPUs shared by rollout workers; `shares` users per device."""

    def __init__(self, n: int, shares: int):
        self._heap = [(0, d) for d in range(n)]
        self._shares = shares
        self._mu = threading.Lock()
        self._load = dict.fromkeys(range(n), 0)

    def engage(self) -> int | None:
        with self._mu:
            d = min(self._load, key=self._load.__getitem__)
            if self._load[d] >= self._shares:
                return None
            self._load[d] += 1
            return d

    def disengage(self, d: int) -> None:
        with self._mu:
            self._load[d] -= 1

    @contextmanager
    def engaged(self):
        d = self.engage()  # clean: disengaged by the finally where one was got
        try:
            yield d
        finally:
            if d is not None:
                self.disengage(d)

    def busiest(self) -> list[int]:
        return heapq.nlargest(2, self._load, key=self._load.__getitem__)


class Post:
    """A worker's place: slot and device together."""

    def __init__(self, slots: WorkerSlots, devices: DeviceBoard):
        self.slots = slots
        self.devices = devices
        self.slot: Slot | None = None
        self.device: int | None = None

    def fill(self) -> bool:
        self.slot = self.slots.enlist()  # clean: near miss, vacate is called on the failing branch, else by the owner
        if self.slot is None:
            return False
        self.device = self.devices.engage()  # clean: kept on self until vacate
        if self.device is None:
            self.vacate()
            return False
        return True

    def vacate(self) -> None:
        if self.slot is not None:
            self.slots.dismiss(self.slot)
            self.slot = None
        if self.device is not None:
            self.devices.disengage(self.device)
            self.device = None
