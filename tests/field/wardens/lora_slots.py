from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class HostAdapter:
    name: str
    a: torch.Tensor
    b: torch.Tensor
    users: int = 0


class HostAdapterStore:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._adapters: OrderedDict[str, HostAdapter] = OrderedDict()

    def add(self, adapter: HostAdapter) -> bool:
        while len(self._adapters) >= self.capacity:
            victim = next((a for a in self._adapters.values() if a.users == 0), None)
            if victim is None:
                return False
            del self._adapters[victim.name]
        self._adapters[adapter.name] = adapter
        return True

    def pin(self, name: str) -> Optional[HostAdapter]:
        adapter = self._adapters.get(name)
        if adapter is None:
            return None
        adapter.users += 1
        self._adapters.move_to_end(name)
        return adapter

    def unpin(self, adapter: HostAdapter) -> None:
        adapter.users -= 1


class DeviceSlots:
    def __init__(self, num_slots: int, rank: int, hidden: int, device: torch.device) -> None:
        self.weights = torch.zeros(num_slots, 2, rank, hidden, device=device)
        self._free = list(range(num_slots))

    def assign(self) -> Optional[int]:
        return self._free.pop(0) if self._free else None

    def unassign(self, slot: int) -> None:
        self.weights[slot].zero_()
        self._free.append(slot)


@dataclass(eq=False)
class LoRARequest:
    rid: str
    adapter: str
    host: Optional[HostAdapter] = None
    slot: int = -1


@dataclass
class ActiveAdapter:
    slot: int
    host: HostAdapter
    requests: set[str] = field(default_factory=set)


class LoRAManager:
    def __init__(self, store: HostAdapterStore, slots: DeviceSlots) -> None:
        self.store = store
        self.slots = slots
        self.active: dict[str, ActiveAdapter] = {}

    def activate(self, req: LoRARequest) -> bool:
        entry = self.active.get(req.adapter)
        if entry is not None:
            entry.requests.add(req.rid)
            req.slot = entry.slot
            return True
        host = self.store.pin(req.adapter)  # leak: no free slot returns False with the host adapter pinned
        if host is None:
            return False
        slot = self.slots.assign()  # clean: near miss, kept in active until the last request deactivates
        if slot is None:
            return False
        self._upload(host, slot)
        self.active[req.adapter] = ActiveAdapter(slot, host, {req.rid})
        req.slot = slot
        return True

    def _upload(self, host: HostAdapter, slot: int) -> None:
        self.slots.weights[slot, 0].copy_(host.a, non_blocking=True)
        self.slots.weights[slot, 1].copy_(host.b, non_blocking=True)

    def deactivate(self, req: LoRARequest) -> None:
        entry = self.active.get(req.adapter)
        if entry is None:
            return
        entry.requests.discard(req.rid)
        req.slot = -1
        if not entry.requests:
            del self.active[req.adapter]
            self.slots.unassign(entry.slot)
            self.store.unpin(entry.host)

    def prefetch(self, name: str) -> bool:
        if name in self.active:
            return True
        slot = self.slots.assign()  # clean: near miss, unassigned when the adapter is unknown, else kept in active
        if slot is None:
            return False
        host = self.store.pin(name)  # clean: near miss, None holds nothing, else the active entry unpins it
        if host is None:
            self.slots.unassign(slot)
            return False
        self._upload(host, slot)
        self.active[name] = ActiveAdapter(slot, host)
        return True

    def evict_idle(self) -> int:
        idle = [name for name, entry in self.active.items() if not entry.requests]
        for name in idle:
            entry = self.active.pop(name)
            self.slots.unassign(entry.slot)
            self.store.unpin(entry.host)
        return len(idle)

    def validate(self, name: str, rank: int) -> bool:
        host = self.store.pin(name)  # leak: a rank that does not fit is refused before unpin
        if host is None:
            return False
        if host.a.shape[0] > rank:
            logger.error("adapter %s has rank %d", name, host.a.shape[0])
            return False
        ok = bool(torch.isfinite(host.a).all() and torch.isfinite(host.b).all())
        self.store.unpin(host)
        return ok

    @contextmanager
    def temporary(self, name: str) -> Iterator[Optional[int]]:
        host = self.store.pin(name)  # clean: near miss, unpinned in finally
        if host is None:
            yield None
            return
        slot: Optional[int] = None
        try:
            slot = self.slots.assign()  # clean: near miss, unassigned in finally when there is one
            if slot is not None:
                self._upload(host, slot)
            yield slot
        finally:
            if slot is not None:
                self.slots.unassign(slot)
            self.store.unpin(host)

    def merge(self, names: list[str], target: str) -> bool:
        parts: list[HostAdapter] = []
        for name in names:
            host = self.store.pin(name)  # leak: an unknown name returns without unpinning the parts before it
            if host is None:
                return False
            parts.append(host)
        a = torch.stack([p.a for p in parts]).mean(0)
        b = torch.stack([p.b for p in parts]).mean(0)
        for part in parts:
            self.store.unpin(part)
        return self.store.add(HostAdapter(target, a, b))

    def swap(self, old: str, new: str) -> bool:
        entry = self.active.get(old)
        if entry is None or entry.requests or new in self.active:
            return False
        host = self.store.pin(new)  # leak: entry.host is rebound, the adapter pinned before stays pinned
        if host is None:
            return False
        self._upload(host, entry.slot)
        entry.host = host
        self.active[new] = self.active.pop(old)
        return True

    def reload(self, name: str) -> bool:
        entry = self.active.get(name)
        if entry is None:
            return False
        host = self.store.pin(name)  # clean: near miss, the earlier pin is dropped before the rebinding
        if host is None:
            return False
        self.store.unpin(entry.host)
        entry.host = host
        self._upload(host, entry.slot)
        return True
