"""Multi-LoRA serving: resident adapter slots, pin counts and per-batch adapter sets."""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set


@dataclass
class Adapter:
    name: str
    slot: int
    rank: int
    weights: Any
    pins: int = 0


@dataclass
class GenRequest:
    prompt: str
    adapter_name: str
    adapter: Optional[Adapter] = None
    error: Optional[str] = None


class AdapterManager:
    """Keeps up to `max_slots` adapters on device; pinned ones cannot be evicted."""

    def __init__(self, store: Dict[str, Any], max_slots: int, max_rank: int) -> None:
        self.store = store
        self.max_rank = max_rank
        self._slots = list(range(max_slots))
        self._resident: "OrderedDict[str, Adapter]" = OrderedDict()

    def _take_slot(self) -> Optional[int]:
        if self._slots:
            return self._slots.pop()  # clean: returned to the caller
        for name, adapter in self._resident.items():
            if adapter.pins == 0:
                del self._resident[name]
                return adapter.slot
        return None

    def _load(self, name: str) -> Optional[Adapter]:
        slot = self._take_slot()  # leak: an adapter of too high rank returns without the slot going back
        if slot is None:
            return None
        weights = self.store.get(name)
        if weights is None:
            self._slots.append(slot)
            return None
        rank = weights["lora_A"].shape[0]
        if rank > self.max_rank:
            return None
        adapter = Adapter(name, slot, rank, weights)
        self._resident[name] = adapter
        return adapter

    def pin(self, name: str) -> Optional[Adapter]:
        adapter = self._resident.get(name) or self._load(name)
        if adapter is None:
            return None
        adapter.pins += 1  # clean: the pin is the caller's
        self._resident.move_to_end(name)
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        adapter.pins -= 1

    def drop(self, name: str) -> bool:
        adapter = self._resident.get(name)
        if adapter is None or adapter.pins:
            return False
        del self._resident[name]
        self._slots.append(adapter.slot)
        return True


class BatchBuilder:
    """Resolves the adapters that a batch of requests needs."""

    def __init__(self, manager: AdapterManager, max_distinct: int) -> None:
        self.manager = manager
        self.max_distinct = max_distinct

    def build(self, requests: List[GenRequest]) -> List[GenRequest]:
        batch: List[GenRequest] = []
        names: Set[str] = set()
        for request in requests:
            adapter = self.manager.pin(request.adapter_name)  # leak: a request over the distinct limit is put off with its pin kept
            if adapter is None:
                request.error = "adapter unavailable"
                continue
            if adapter.name not in names and len(names) == self.max_distinct:
                continue
            names.add(adapter.name)
            request.adapter = adapter
            batch.append(request)
        return batch

    def finish(self, batch: List[GenRequest]) -> None:
        for request in batch:
            if request.adapter is not None:
                self.manager.unpin(request.adapter)
                request.adapter = None

    def rebind(self, request: GenRequest, name: str) -> bool:
        """Switch a request of the running batch to another adapter."""
        previous = request.adapter
        adapter = self.manager.pin(name)  # clean: near miss, previous is unpinned when replaced; finish unpins this one
        if adapter is None:
            return False
        request.adapter = adapter
        if previous is not None:
            self.manager.unpin(previous)
        return True


@dataclass
class WarmSet:
    """Adapters an operator keeps hot."""

    manager: AdapterManager
    pinned: Dict[str, Adapter] = field(default_factory=dict)

    def add(self, name: str) -> bool:
        if name in self.pinned:
            return True
        adapter = self.manager.pin(name)  # clean: held in the set, discard and clear unpin it
        if adapter is None:
            return False
        self.pinned[name] = adapter
        return True

    def refresh(self, names: List[str]) -> None:
        for name in names:
            adapter = self.manager.pin(name)  # leak: a name already in the set has its entry overwritten, one pin lost
            if adapter is not None:
                self.pinned[name] = adapter
        for name in set(self.pinned) - set(names):
            self.discard(name)

    def discard(self, name: str) -> None:
        adapter = self.pinned.pop(name, None)
        if adapter is not None:
            self.manager.unpin(adapter)

    def clear(self) -> None:
        for name in list(self.pinned):
            self.discard(name)


def adapter_rank(manager: AdapterManager, name: str) -> int:
    adapter = manager.pin(name)  # leak: the rank is read and the pin kept
    return adapter.rank if adapter is not None else 0


def merge_pair(manager: AdapterManager, left: str, right: str, lock: threading.Lock) -> Optional[Any]:
    """Average two adapters of equal rank."""
    if not lock.acquire(timeout=1.0):  # clean: near miss, released in the finally, the early return has no lock
        return None
    try:
        a = manager.pin(left)  # leak: kept when the other adapter cannot be pinned
        b = manager.pin(right)  # clean: near miss, unpinned wherever both were found, and alone when the first is absent
        if a is None:
            if b is not None:
                manager.unpin(b)
            return None
        if b is None:
            return None
        merged = (a.weights["lora_A"] + b.weights["lora_A"]) / 2 if a.rank == b.rank else None
        manager.unpin(b)
        manager.unpin(a)
        return merged
    finally:
        lock.release()
