"""Expert weights of a mixture-of-experts model, cached in device slots."""
from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from typing import Dict, List, Optional, Set

import torch


class DeviceSlots:
    """Expert-sized rows on the device. checkout() gives an index or None."""

    def __init__(self, count: int, numel: int):
        self.store = torch.empty(count, numel, device="cuda")
        self._free = set(range(count))

    def checkout(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def checkin(self, slot: int) -> None:
        self._free.add(slot)


class PinCounts:
    """Counted pins that keep an expert from being evicted."""

    def __init__(self):
        self._n: Dict[int, int] = defaultdict(int)

    def pin(self, expert: int) -> None:
        self._n[expert] += 1

    def unpin(self, expert: int) -> None:
        if self._n[expert] == 0:
            raise RuntimeError(f"expert {expert} is not pinned")
        self._n[expert] -= 1

    def pinned(self, expert: int) -> bool:
        return self._n[expert] > 0


class ExpertCache:
    def __init__(self, slots: DeviceSlots, pins: PinCounts, host):
        self.slots = slots
        self.pins = pins
        self.host = host
        self.table: "OrderedDict[int, int]" = OrderedDict()

    def get(self, expert: int) -> Optional[torch.Tensor]:
        slot = self.table.get(expert)
        if slot is not None:
            self.table.move_to_end(expert)
            return self.slots.store[slot]
        slot = self.slots.checkout()  # clean: near miss, absent key, evict_one and invalidate check it in
        if slot is None:
            slot = self.evict_one()
        if slot is None:
            return None
        self.slots.store[slot].copy_(self.host[expert], non_blocking=True)
        self.table[expert] = slot
        return self.slots.store[slot]

    def evict_one(self) -> Optional[int]:
        for expert in self.table:
            if not self.pins.pinned(expert):
                return self.table.pop(expert)
        return None

    def invalidate(self) -> None:
        for slot in self.table.values():
            self.slots.checkin(slot)
        self.table.clear()


class AgedCache:
    """Drops experts which were not used for `ttl` seconds."""

    def __init__(self, slots: DeviceSlots, host, ttl: float):
        self.slots = slots
        self.host = host
        self.ttl = ttl
        self.table: Dict[int, int] = {}
        self.used: Dict[int, float] = {}

    def get(self, expert: int) -> Optional[torch.Tensor]:
        if expert not in self.table:
            slot = self.slots.checkout()  # leak: sweep rebuilds the table without the stale slots
            if slot is None:
                return None
            self.slots.store[slot].copy_(self.host[expert])
            self.table[expert] = slot
        self.used[expert] = time.monotonic()
        return self.slots.store[self.table[expert]]

    def sweep(self) -> None:
        edge = time.monotonic() - self.ttl
        self.table = {e: s for e, s in self.table.items() if self.used[e] >= edge}
        self.used = {e: t for e, t in self.used.items() if e in self.table}

    def close(self) -> None:
        for slot in self.table.values():
            self.slots.checkin(slot)
        self.table.clear()


class RoutedBatch:
    """Pins the experts of a batch for the time of its forward."""

    def __init__(self, cache: ExpertCache, pins: PinCounts):
        self.cache = cache
        self.pins = pins
        self.held: Set[int] = set()

    def open(self, routed: torch.Tensor) -> None:
        for expert in routed.flatten().tolist():
            self.pins.pin(expert)  # leak: an expert routed twice is pinned twice but the set holds it once
            self.held.add(expert)

    def open_unique(self, routed: torch.Tensor) -> None:
        for expert in routed.unique().tolist():
            if expert in self.held:
                continue
            self.pins.pin(expert)  # clean: near miss, skipped when already in the set
            self.held.add(expert)

    def close(self) -> None:
        for expert in self.held:
            self.pins.unpin(expert)
        self.held.clear()


class SpeculativePrefetch:
    def __init__(self, slots: DeviceSlots, host, stream: torch.cuda.Stream):
        self.slots = slots
        self.host = host
        self.stream = stream
        self.guess: Dict[int, int] = {}

    def predict(self, experts: List[int]) -> None:
        for expert in experts:
            if expert in self.guess:
                continue
            slot = self.slots.checkout()  # leak: settle clears the wrong guesses without checkin
            if slot is None:
                return
            with torch.cuda.stream(self.stream):
                self.slots.store[slot].copy_(self.host[expert], non_blocking=True)
            self.guess[expert] = slot

    def settle(self, actual: List[int], cache: ExpertCache) -> None:
        self.stream.synchronize()
        for expert in actual:
            slot = self.guess.pop(expert, None)
            if slot is None:
                continue
            if expert in cache.table:
                self.slots.checkin(slot)
            else:
                cache.table[expert] = slot
        self.guess.clear()


class HotSwapper:
    """Replaces the weights of an expert while it is served."""

    def __init__(self, cache: ExpertCache, slots: DeviceSlots):
        self.cache = cache
        self.slots = slots
        self.shadow: Optional[int] = None

    def load(self, weights: torch.Tensor) -> bool:
        if self.shadow is None:
            self.shadow = self.slots.checkout()  # clean: commit moves it into the cache table, discard checks it in
        if self.shadow is None:
            return False
        self.slots.store[self.shadow].copy_(weights)
        return True

    def commit(self, expert: int) -> None:
        if self.shadow is None:
            return
        old = self.cache.table.get(expert)
        self.cache.table[expert] = self.shadow
        self.shadow = None
        if old is not None:
            self.slots.checkin(old)

    def discard(self) -> None:
        if self.shadow is not None:
            self.slots.checkin(self.shadow)
            self.shadow = None


class ReplicaBalancer:
    """Gives busy experts further replicas."""

    def __init__(self, slots: DeviceSlots, host):
        self.slots = slots
        self.host = host
        self.replicas: Dict[int, List[int]] = defaultdict(list)

    def scale(self, expert: int, want: int) -> int:
        have = self.replicas[expert]
        while len(have) < want:
            slot = self.slots.checkout()  # leak: scaling down cuts the list and loses the tail
            if slot is None:
                break
            self.slots.store[slot].copy_(self.host[expert])
            have.append(slot)
        if len(have) > want:
            self.replicas[expert] = have[:want]
        return len(self.replicas[expert])

    def close(self) -> None:
        for slots in self.replicas.values():
            for slot in slots:
                self.slots.checkin(slot)
        self.replicas.clear()


class SharedExpert:
    def __init__(self, slots: DeviceSlots, host, expert: int):
        self.slots = slots
        self.slot = slots.checkout()  # clean: owner ends it in close
        if self.slot is None:
            raise MemoryError("no expert slot")
        slots.store[self.slot].copy_(host[expert])

    def close(self) -> None:
        if self.slot is not None:
            self.slots.checkin(self.slot)
            self.slot = None


def run_layer(cache: ExpertCache, pins: PinCounts, experts: List[int], x: torch.Tensor) -> Optional[torch.Tensor]:
    out = torch.zeros_like(x)
    for expert in experts:
        pins.pin(expert)  # leak: the weights are None, returns with this pin held
        weights = cache.get(expert)
        if weights is None:
            return None
        out += x @ weights.view(x.shape[-1], -1)
        pins.unpin(expert)
    return out
