"""LoRA adapters: weights pinned in host memory, loaded to a bounded number of device slots."""
from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Iterable


class DeviceSlots:
    def __init__(self, count: int) -> None:
        self._vacant = set(range(count))
        self.owner: dict[int, str] = {}

    def reserve(self, name: str) -> int | None:
        if not self._vacant:
            return None
        slot = self._vacant.pop()
        self.owner[slot] = name
        return slot

    def vacate(self, slot: int) -> None:
        self.owner.pop(slot, None)
        self._vacant.add(slot)


class HostWeights:
    def __init__(self) -> None:
        self._pins: Counter[str] = Counter()
        self._data: OrderedDict[str, bytes] = OrderedDict()

    def put(self, name: str, blob: bytes) -> None:
        self._data[name] = blob

    def pin(self, name: str) -> bytes:
        self._pins[name] += 1
        return self._data[name]

    def unpin(self, name: str, times: int = 1) -> None:
        self._pins[name] -= times
        if self._pins[name] <= 0:
            del self._pins[name]

    def shrink(self, keep: int) -> None:
        for name in list(self._data):
            if len(self._data) <= keep:
                return
            if name not in self._pins:
                del self._data[name]


@dataclass
class Active:
    name: str
    slot: int
    size: int


class AdapterManager:
    """Base: turns a name into a loaded adapter."""

    def __init__(self, host: HostWeights, slots: DeviceSlots) -> None:
        self.host = host
        self.slots = slots

    def activate(self, name: str) -> Active | None:
        blob = self.host.pin(name)  # clean: unpinned on refusal and by deactivate
        slot = self.slots.reserve(name)  # leak: deactivate unpins the weights but never vacates the slot
        if slot is None:
            self.host.unpin(name)
            return None
        return Active(name, slot, len(blob))

    def deactivate(self, active: Active) -> None:
        self.host.unpin(active.name)
        active.size = 0


class MergedManager:
    """Adapters merged into a copy of the base weights."""

    def __init__(self, host: HostWeights, slots: DeviceSlots) -> None:
        self.host = host
        self.slots = slots

    def merge(self, name: str) -> Active | None:
        slot = self.slots.reserve(name)  # clean: near miss, unmerge goes through _unload, which vacates
        if slot is None:
            return None
        blob = self.host.pin(name)  # clean: near miss, _unload unpins
        return Active(name, slot, len(blob))

    def unmerge(self, active: Active) -> None:
        self._unload(active)
        active.size = 0

    def _unload(self, active: Active) -> None:
        self.slots.vacate(active.slot)
        self.host.unpin(active.name)


class Switcher:
    """Keeps one merged adapter at a time."""

    def __init__(self, manager: MergedManager) -> None:
        self.manager = manager
        self.current: Active | None = None
        self.switches = 0

    def switch(self, name: str) -> bool:
        fresh = self.manager.merge(name)  # leak: where the name is the current one, the fresh copy is dropped
        if fresh is None:
            return False
        if self.current is not None:
            if self.current.name == fresh.name:
                return True
            self.manager.unmerge(self.current)
        self.current = fresh
        self.switches += 1
        return True

    def stop(self) -> None:
        if self.current is not None:
            self.manager.unmerge(self.current)
            self.current = None


class LazySwitcher:
    def __init__(self, manager: MergedManager) -> None:
        self.manager = manager
        self.current: Active | None = None

    def switch(self, name: str) -> bool:
        if self.current is not None and self.current.name == name:
            return True
        fresh = self.manager.merge(name)  # clean: near miss, the name was compared before merging
        if fresh is None:
            return False
        if self.current is not None:
            self.manager.unmerge(self.current)
        self.current = fresh
        return True

    def stop(self) -> None:
        if self.current is not None:
            self.manager.unmerge(self.current)
            self.current = None


@dataclass
class Request:
    rid: int
    lora: str | None
    tokens: int


class BatchRunner:
    def __init__(self, host: HostWeights) -> None:
        self.host = host
        self.bytes_read = 0

    def run(self, batch: list[Request]) -> int:
        for req in batch:
            if req.lora is not None:
                self.bytes_read += len(self.host.pin(req.lora))  # leak: pinned per request, unpinned per name
        done = sum(r.tokens for r in batch)
        for name in {r.lora for r in batch if r.lora is not None}:
            self.host.unpin(name)
        return done

    def run_counted(self, batch: list[Request]) -> int:
        for req in batch:
            if req.lora is not None:
                self.bytes_read += len(self.host.pin(req.lora))  # clean: near miss, unpinned by the count
        done = sum(r.tokens for r in batch)
        for name, times in Counter(r.lora for r in batch if r.lora is not None).items():
            self.host.unpin(name, times)
        return done

    def run_distinct(self, batch: list[Request]) -> int:
        names = {r.lora for r in batch if r.lora is not None}
        for name in names:
            self.bytes_read += len(self.host.pin(name))  # clean: near miss, the same set is unpinned
        done = sum(r.tokens for r in batch)
        for name in names:
            self.host.unpin(name)
        return done


def preload(manager: MergedManager, names: Iterable[str]) -> bool:
    """Check that all of the adapters fit on the device together."""
    loaded: list[Active] = []
    for name in names:
        active = manager.merge(name)  # leak: where one does not fit, those before it stay loaded
        if active is None:
            return False
        loaded.append(active)
    for active in loaded:
        manager.unmerge(active)
    return True


def preload_report(manager: MergedManager, names: Iterable[str]) -> dict[str, int]:
    loaded: list[Active] = []
    for name in names:
        active = manager.merge(name)  # clean: near miss, break falls into the unloading loop
        if active is None:
            break
        loaded.append(active)
    sizes = {a.name: a.size for a in loaded}
    for active in loaded:
        manager.unmerge(active)
    return sizes
