"""GPU slots for LoRA adapters: reservation, pinning for running batches, hot swap."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class Adapter:
    adapter_id: str
    rank: int
    weights: dict[str, object] = field(default_factory=dict)
    pins: int = 0
    slot: int | None = None


class SlotTable:
    """Fixed number of device slots; a slot belongs to one adapter at a time."""

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._vacant = list(range(num_slots))

    def reserve(self) -> int | None:
        with self._lock:
            return self._vacant.pop() if self._vacant else None

    def unreserve(self, slot: int) -> None:
        with self._lock:
            self._vacant.append(slot)

    def reserve_pair(self) -> tuple[int, int] | None:
        """Two slots for adapters split over two ranks, or none."""
        first = self.reserve()  # leak: not put back when there is no second slot
        if first is None:
            return None
        second = self.reserve()  # clean: returned together with the first
        if second is None:
            return None
        return first, second


class AdapterCache:
    def __init__(self, slots: SlotTable, max_rank: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.resident: dict[str, Adapter] = {}
        self.shadow: dict[str, int] = {}

    def pin(self, adapter: Adapter) -> None:
        adapter.pins += 1

    def unpin(self, adapter: Adapter) -> None:
        adapter.pins -= 1

    def activate(self, adapter: Adapter) -> bool:
        if adapter.adapter_id in self.resident:
            return True
        slot = self.slots.reserve()  # clean: recorded in the adapter, evict() gives it back
        if slot is None and self._evict_one():
            slot = self.slots.reserve()  # clean: near miss, only taken when the first was None
        if slot is None:
            return False
        adapter.slot = slot
        self.resident[adapter.adapter_id] = adapter
        return True

    def evict(self, adapter_id: str) -> None:
        adapter = self.resident.pop(adapter_id)
        slot, adapter.slot = adapter.slot, None
        self.slots.unreserve(slot)

    def _evict_one(self) -> bool:
        for adapter_id, adapter in self.resident.items():
            if adapter.pins == 0:
                self.evict(adapter_id)
                return True
        return False

    def warm(self, adapters: list[Adapter]) -> int:
        """Copy weights into spare slots ahead of time; returns how many are ready."""
        ready = 0
        for adapter in adapters:
            slot = self.slots.reserve()  # leak: an adapter over the rank limit is skipped with its slot reserved
            if slot is None:
                break
            if adapter.rank > self.max_rank:
                logger.info("skipping %s, rank %d", adapter.adapter_id, adapter.rank)
                continue
            if adapter.adapter_id in self.shadow:
                self.slots.unreserve(slot)
                continue
            self.shadow[adapter.adapter_id] = slot
            ready += 1
        return ready

    def adopt(self, adapter: Adapter) -> bool:
        slot = self.shadow.pop(adapter.adapter_id, None)
        if slot is None:
            return False
        if adapter.adapter_id in self.resident:
            self.slots.unreserve(slot)
            return True
        adapter.slot = slot
        self.resident[adapter.adapter_id] = adapter
        return True

    def replace(self, adapter: Adapter) -> bool:
        """Install a new revision beside the old one, then switch over."""
        old = self.resident.get(adapter.adapter_id)
        slot = self.slots.reserve()  # clean: moved into the new revision or put back
        if slot is None:
            return False
        if old is not None and old.pins:
            self.slots.unreserve(slot)
            return False
        if old is not None:
            self.evict(adapter.adapter_id)
        adapter.slot = slot
        self.resident[adapter.adapter_id] = adapter
        return True

    def probe(self, adapter: Adapter) -> bool:
        """Does this adapter load at all?"""
        slot = self.slots.reserve()  # leak: an adapter without weights returns before the unreserve
        if slot is None:
            return False
        if not adapter.weights:
            return False
        ok = all(w is not None for w in adapter.weights.values())
        self.slots.unreserve(slot)
        return ok

    def install_split(self, left: Adapter, right: Adapter) -> bool:
        if left.pins or right.pins:
            return False
        for adapter in (left, right):
            if adapter.adapter_id in self.resident:
                self.evict(adapter.adapter_id)
        pair = self.slots.reserve_pair()  # clean: each half is recorded in its adapter
        if pair is None:
            return False
        left.slot, right.slot = pair
        self.resident[left.adapter_id] = left
        self.resident[right.adapter_id] = right
        return True

    def benchmark_split(self, left: Adapter, right: Adapter) -> int:
        pair = self.slots.reserve_pair()  # leak: only the first of the two slots is put back
        if pair is None:
            return 0
        a, b = pair
        cost = left.rank * (a + 1) + right.rank * (b + 1)
        self.slots.unreserve(a)
        return cost


class PinScope:
    def __init__(self, cache: AdapterCache, adapters: list[Adapter]) -> None:
        self.cache = cache
        self.adapters = adapters

    def __enter__(self) -> "PinScope":
        for adapter in self.adapters:
            self.cache.pin(adapter)  # leak: __exit__ returns early on an exception, which the batch runner survives
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            logger.warning("batch failed: %s", exc)
            return False
        for adapter in self.adapters:
            self.cache.unpin(adapter)
        return False


class BatchRunner:
    def __init__(self, cache: AdapterCache) -> None:
        self.cache = cache
        self.pinned: dict[int, list[Adapter]] = {}
        self.next_batch = 0

    def run(self, adapters: list[Adapter], forward) -> list[object]:
        try:
            with PinScope(self.cache, adapters):  # clean: the scope is left on every way, the fault is the scope's own
                return [forward(a) for a in adapters]
        except RuntimeError:
            return []

    def begin(self, adapters: list[Adapter]) -> int | None:
        held: list[Adapter] = []
        for adapter in adapters:
            if not self.cache.activate(adapter):  # clean: an activated adapter stays resident until evicted
                for other in held:
                    self.cache.unpin(other)
                return None
            self.cache.pin(adapter)  # clean: near miss, held adapters are unpinned when a later one does not fit
            held.append(adapter)
        batch = self.next_batch
        self.next_batch += 1
        self.pinned[batch] = held
        return batch

    def end(self, batch: int) -> None:
        for adapter in self.pinned.pop(batch):
            self.cache.unpin(adapter)

    def run_one(self, adapter: Adapter, forward) -> object | None:
        self.cache.pin(adapter)  # leak: an adapter that cannot be activated returns None with the pin up
        if not self.cache.activate(adapter):  # clean: stays resident until evicted
            return None
        try:
            return forward(adapter)
        finally:
            self.cache.unpin(adapter)

    def score(self, adapter: Adapter, forward) -> float:
        self.cache.pin(adapter)  # clean: unpinned in the finally on both returns
        try:
            if adapter.slot is None:
                return 0.0
            return float(forward(adapter))
        finally:
            self.cache.unpin(adapter)
