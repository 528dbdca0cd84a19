"""GPU LoRA slot manager: host weights are pinned by reference, slots hold the packed A/B matrices."""
from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator

import torch

logger = logging.getLogger(__name__)


@dataclass
class HostAdapter:
    name: str
    rank: int
    weights: dict[str, torch.Tensor]
    pins: int = 0


class HostAdapterCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._items: OrderedDict[str, HostAdapter] = OrderedDict()

    def add(self, adapter: HostAdapter) -> None:
        while len(self._items) >= self.capacity:
            victim = next((n for n, a in self._items.items() if a.pins == 0), None)
            if victim is None:
                break
            del self._items[victim]
        self._items[adapter.name] = adapter

    def pin(self, name: str) -> HostAdapter | None:
        item = self._items.get(name)
        if item is None:
            return None
        item.pins += 1
        self._items.move_to_end(name)
        return item

    def unpin(self, item: HostAdapter) -> None:
        item.pins -= 1


class SlotTable:
    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._free = list(range(num_slots))
        self._loaded: dict[int, str] = {}

    def claim(self) -> int:
        return self._free.pop() if self._free else -1

    def vacate(self, slot: int) -> None:
        self._loaded.pop(slot, None)
        self._free.append(slot)

    def load(self, slot: int, adapter: HostAdapter) -> bool:
        if adapter.rank > self.max_rank:
            return False
        self._loaded[slot] = adapter.name
        return True


@dataclass
class ActiveLora:
    slot: int
    host: HostAdapter
    users: int = 1


@dataclass
class Batch:
    names: list[str] = field(default_factory=list)
    extra_pins: list[HostAdapter] = field(default_factory=list)


class LoraManager:
    def __init__(self, cache: HostAdapterCache, slots: SlotTable) -> None:
        self.cache = cache
        self.slots = slots
        self.active: dict[str, ActiveLora] = {}
        self.static: dict[str, int] = {}

    def activate(self, name: str) -> bool:
        entry = self.active.get(name)
        if entry is not None:
            entry.users += 1
            return True
        host = self.cache.pin(name)  # clean: near miss, both failure branches unpin, success files it in active
        if host is None:
            return False
        slot = self.slots.claim()  # leak: a rank that does not fit unpins the host side but keeps the slot
        if slot < 0:
            self.cache.unpin(host)
            return False
        if not self.slots.load(slot, host):
            self.cache.unpin(host)
            logger.warning("adapter %s has rank %d > %d", name, host.rank, self.slots.max_rank)
            return False
        self.active[name] = ActiveLora(slot, host)
        return True

    def deactivate(self, name: str) -> None:
        entry = self.active.get(name)
        if entry is None:
            return
        entry.users -= 1
        if entry.users > 0:
            return
        del self.active[name]
        self.slots.vacate(entry.slot)
        self.cache.unpin(entry.host)

    def install_static(self, names: list[str]) -> int:
        done = 0
        for name in names:
            if name in self.static:
                continue
            host = self.cache.pin(name)  # leak: the break on a full table leaves this adapter pinned
            if host is None:
                continue
            slot = self.slots.claim()  # clean: near miss, kept in static and vacated by remove_static, or given straight back
            if slot < 0:
                break
            if not self.slots.load(slot, host):
                self.slots.vacate(slot)
                self.cache.unpin(host)
                continue
            self.static[name] = slot
            self.cache.unpin(host)
            done += 1
        return done

    def remove_static(self, name: str) -> bool:
        slot = self.static.pop(name, -1)
        if slot < 0:
            return False
        self.slots.vacate(slot)
        return True

    def reload_static(self, name: str) -> bool:
        if name not in self.static:
            return False
        host = self.cache.pin(name)  # clean: near miss, the finally unpins on each return
        if host is None:
            return False
        try:
            slot = self.slots.claim()  # leak: replaces the table entry of a static adapter whose old slot is not vacated
            if slot < 0:
                return False
            if not self.slots.load(slot, host):
                self.slots.vacate(slot)
                return False
            self.static[name] = slot
            return True
        finally:
            self.cache.unpin(host)

    @contextmanager
    def pinned(self, name: str) -> Iterator[HostAdapter | None]:
        host = self.cache.pin(name)  # clean: unpinned in the finally when present
        try:
            yield host
        finally:
            if host is not None:
                self.cache.unpin(host)

    def rank_of(self, name: str) -> int:
        with self.pinned(name) as host:  # clean: near miss, the context manager unpins although the body returns
            if host is None:
                return 0
            return host.rank

    def prefetch(self, batch: Batch, names: list[str]) -> None:
        seen: set[str] = set()
        for name in names:
            host = self.cache.pin(name)  # leak: a repeated name is pinned again and skipped without an unpin
            if host is None or name in seen:
                continue
            seen.add(name)
            batch.names.append(name)
            batch.extra_pins.append(host)

    def drop_prefetch(self, batch: Batch) -> None:
        while batch.extra_pins:
            self.cache.unpin(batch.extra_pins.pop())
        batch.names.clear()

    def total_bytes(self, names: list[str]) -> int:
        total = 0
        for name in names:
            host = self.cache.pin(name)  # clean: near miss, the skip happens only without a pin
            if host is None:
                continue
            total += sum(t.nbytes for t in host.weights.values())
            self.cache.unpin(host)
        return total

    def probe_slots(self) -> int:
        taken: list[int] = []
        while (slot := self.slots.claim()) >= 0:  # clean: near miss, every probed slot goes back below
            taken.append(slot)
        for slot in taken:
            self.slots.vacate(slot)
        return len(taken)


def run_batch(mgr: LoraManager, names: list[str]) -> list[str]:
    batch = Batch()
    mgr.prefetch(batch, names)
    started: list[str] = []
    for name in batch.names:
        if mgr.activate(name):
            started.append(name)
    mgr.drop_prefetch(batch)
    for name in started:
        mgr.deactivate(name)
    return started
