"""Device slots for LoRA adapters, shared by concurrent requests."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Set

logger = logging.getLogger(__name__)


class AdapterNotFound(KeyError):
    pass


class HostAdapterStore:
    """Keeps adapter weights in host memory; lent weights are never dropped."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._weights: "OrderedDict[str, bytes]" = OrderedDict()
        self._lent: Dict[str, int] = {}

    def register(self, name: str, blob: bytes) -> None:
        while len(self._weights) >= self.capacity:
            for victim in self._weights:
                if not self._lent.get(victim):
                    del self._weights[victim]
                    break
            else:
                raise MemoryError("all host adapters are lent")
        self._weights[name] = blob

    def borrow(self, name: str) -> bytes:
        if name not in self._weights:
            raise AdapterNotFound(name)
        self._lent[name] = self._lent.get(name, 0) + 1
        self._weights.move_to_end(name)
        return self._weights[name]

    def give_back(self, name: str) -> None:
        self._lent[name] -= 1
        if self._lent[name] == 0:
            del self._lent[name]


class SlotPool:
    def __init__(self, num_slots: int) -> None:
        self._free: List[int] = list(range(num_slots))
        self._buffers: List[Optional[bytes]] = [None] * num_slots

    def claim(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def unclaim(self, slot: int) -> None:
        self._buffers[slot] = None
        self._free.append(slot)

    def upload(self, slot: int, blob: bytes, rank: int) -> None:
        if rank > 64:
            raise ValueError(f"rank {rank} exceeds max_lora_rank")
        self._buffers[slot] = blob


class AdapterManager:
    def __init__(self, store: HostAdapterStore, slots: SlotPool) -> None:
        self.store = store
        self.slots = slots
        self.resident: "OrderedDict[str, int]" = OrderedDict()
        self._pins: Dict[str, int] = {}
        self._mutex = threading.Lock()

    def pin(self, name: str) -> int:
        slot = self.resident[name]
        self._pins[name] = self._pins.get(name, 0) + 1
        return slot

    def unpin(self, name: str) -> None:
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]

    def _evict_one(self) -> bool:
        for name in self.resident:
            if name not in self._pins:
                self.slots.unclaim(self.resident.pop(name))
                return True
        return False

    def load(self, name: str, rank: int) -> bool:
        if name in self.resident:
            return True
        blob = self.store.borrow(name)  # clean: given back in finally
        try:
            slot = self.slots.claim()  # clean: near miss, None leads to a second claim
            if slot is None:
                if not self._evict_one():
                    return False
                slot = self.slots.claim()  # clean: stored as resident, or unclaimed on a bad rank
            try:
                self.slots.upload(slot, blob, rank)
            except ValueError:
                logger.warning("adapter %s rejected", name)
                self.slots.unclaim(slot)
                return False
            self.resident[name] = slot
            return True
        finally:
            self.store.give_back(name)

    def preload(self, names: List[str], rank: int) -> int:
        """Fills empty slots at start-up, skipping adapters that do not fit."""
        count = 0
        for name in names:
            try:
                blob = self.store.borrow(name)  # leak: the full-pool break and the bad-rank handler leave it lent
                slot = self.slots.claim()  # leak: a bad rank is caught and the slot forgotten
                if slot is None:
                    break
                self.slots.upload(slot, blob, rank)
                self.resident[name] = slot
                self.store.give_back(name)
                count += 1
            except (AdapterNotFound, ValueError) as err:
                logger.warning("skipping %s: %s", name, err)
        return count

    def set_default(self, name: str) -> bool:
        self._mutex.acquire()  # leak: an adapter that is not resident returns with the mutex held
        if name not in self.resident:
            return False
        self.resident.move_to_end(name, last=False)
        self._mutex.release()
        return True

    def drop(self, name: str) -> bool:
        if not self._mutex.acquire(blocking=False):  # clean: near miss, False means not taken, else released in finally
            return False
        try:
            if name in self._pins or name not in self.resident:
                return False
            self.slots.unclaim(self.resident.pop(name))
            return True
        finally:
            self._mutex.release()

    @contextmanager
    def pinned(self, name: str) -> Iterator[int]:
        slot = self.pin(name)  # clean: unpinned in finally
        try:
            yield slot
        finally:
            self.unpin(name)


class LoraBatcher:
    """Maps requests of one step to adapter slots."""

    def __init__(self, manager: AdapterManager, max_loras: int) -> None:
        self.manager = manager
        self.max_loras = max_loras
        self.active: Dict[str, str] = {}

    def add_request(self, rid: str, name: str, rank: int) -> bool:
        if not self.manager.load(name, rank):
            return False
        self.manager.pin(name)  # clean: name goes to active, finish unpins it
        self.active[rid] = name
        return True

    def finish(self, rid: str) -> None:
        name = self.active.pop(rid, None)
        if name is not None:
            self.manager.unpin(name)

    def build_mapping(self, names: List[str]) -> Optional[List[int]]:
        """Slots for a dummy warm-up batch."""
        mapping: List[int] = []
        seen: Set[str] = set()
        for name in names:
            mapping.append(self.manager.pin(name))  # leak: `seen` unpins each name once though repeats pin it again
            seen.add(name)
        self._run_dummy(mapping)
        for name in seen:
            self.manager.unpin(name)
        return mapping

    def warmup(self, names: List[str]) -> None:
        for name in names:
            with self.manager.pinned(name) as slot:  # clean: with
                if slot == 0:
                    continue
                self._run_dummy([slot])

    def switch(self, rid: str, name: str) -> None:
        """A request of a session moves to another adapter between turns."""
        previous = self.active.get(rid)
        if previous == name:
            return
        self.manager.pin(name)  # clean: near miss, takes the place of the previous pin, which is dropped
        self.active[rid] = name
        if previous is not None:
            self.manager.unpin(previous)

    def _run_dummy(self, slots: List[int]) -> int:
        return sum(slots)
