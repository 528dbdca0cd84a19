"""LoRA adapter slots on the device, with pinning by running requests."""
from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Dict, Iterable, List, Optional, Tuple

logger = logging.getLogger(__name__)


class AdapterLoadError(RuntimeError):
    pass


class AdapterSlots:
    """A fixed number of slots in the stacked A/B weights."""

    def __init__(self, num_slots: int) -> None:
        self._free: List[int] = list(range(num_slots))

    def take_slot(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def put_slot(self, slot: int) -> None:
        self._free.append(slot)


class AdapterWeights:
    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.users = 0


class AdapterStore:
    """Host side adapters; `pin` keeps an adapter from being evicted."""

    def __init__(self, ranks: Dict[str, int]) -> None:
        self._weights = {name: AdapterWeights(name, r) for name, r in ranks.items()}

    def pin(self, name: str) -> Optional[AdapterWeights]:
        w = self._weights.get(name)
        if w is not None:
            w.users += 1
        return w

    def unpin(self, w: AdapterWeights) -> None:
        w.users -= 1


class LoRAManager:
    def __init__(self, store: AdapterStore, slots: AdapterSlots, max_rank: int) -> None:
        self.store = store
        self.slots = slots
        self.max_rank = max_rank
        self.active: "OrderedDict[str, Tuple[int, AdapterWeights]]" = OrderedDict()
        self.request_pins: Dict[str, List[AdapterWeights]] = {}
        self.warm: Dict[str, AdapterWeights] = {}

    def _copy_to_slot(self, w: AdapterWeights, slot: int) -> None:
        if w.rank <= 0:
            raise AdapterLoadError(f"{w.name}: bad rank {w.rank} for slot {slot}")

    def activate(self, name: str) -> Optional[int]:
        if name in self.active:
            self.active.move_to_end(name)
            return self.active[name][0]
        w = self.store.pin(name)  # leak: returned without unpin when there is no slot
        if w is None:
            return None
        if w.rank > self.max_rank:
            self.store.unpin(w)
            logger.warning("adapter %s exceeds rank %d", name, self.max_rank)
            return None
        slot = self.slots.take_slot()  # leak: the handler for a failed copy unpins but keeps the slot
        if slot is None:
            return None
        try:
            self._copy_to_slot(w, slot)
        except AdapterLoadError:
            self.store.unpin(w)
            return None
        self.active[name] = (slot, w)
        return slot

    def activate_or_evict(self, name: str) -> Optional[int]:
        if name in self.active:
            return self.active[name][0]
        w = self.store.pin(name)  # clean: near miss, both failure ways unpin and success files it in active
        if w is None:
            return None
        slot = self.slots.take_slot()  # clean: near miss, None falls back to the evicted slot; the handler puts it back
        if slot is None:
            slot = self._evict_one()
            if slot is None:
                self.store.unpin(w)
                return None
        try:
            self._copy_to_slot(w, slot)
        except AdapterLoadError:
            self.slots.put_slot(slot)
            self.store.unpin(w)
            return None
        self.active[name] = (slot, w)
        return slot

    def _evict_one(self) -> Optional[int]:
        for name, (slot, w) in self.active.items():
            if w.users == 1:
                del self.active[name]
                self.store.unpin(w)
                return slot
        return None

    def deactivate(self, name: str) -> bool:
        entry = self.active.pop(name, None)
        if entry is None:
            return False
        slot, w = entry
        self.slots.put_slot(slot)
        self.store.unpin(w)
        return True

    def attach(self, request_id: str, names: Iterable[str]) -> bool:
        pins: List[AdapterWeights] = []
        for name in names:
            w = self.store.pin(name)  # clean: near miss, rolled back on a missing name, else kept by the request
            if w is None:
                for p in pins:
                    self.store.unpin(p)
                return False
            pins.append(w)
        self.detach(request_id)
        self.request_pins[request_id] = pins
        return True

    def swap_adapter(self, request_id: str, name: str) -> bool:
        w = self.store.pin(name)  # clean: near miss, the request's old pins are lowered and this one takes their place
        if w is None:
            return False
        for old in self.request_pins.pop(request_id, []):
            self.store.unpin(old)
        self.request_pins[request_id] = [w]
        return True

    def detach(self, request_id: str) -> None:
        for w in self.request_pins.pop(request_id, []):
            self.store.unpin(w)

    def keep_warm(self, names: Iterable[str]) -> None:
        for name in names:
            w = self.store.pin(name)  # leak: a name that is already warm is overwritten and its earlier pin lost
            if w is not None:
                self.warm[name] = w

    def prefetch(self, names: Iterable[str]) -> int:
        added = 0
        for name in names:
            if name in self.warm:
                continue
            w = self.store.pin(name)  # clean: near miss, guarded against an existing entry, dropped in cool_down
            if w is None:
                continue
            self.warm[name] = w
            added += 1
        return added

    def cool_down(self) -> None:
        while self.warm:
            _, w = self.warm.popitem()
            self.store.unpin(w)

    def max_rank_of(self, names: Iterable[str]) -> int:
        best = 0
        for name in names:
            w = self.store.pin(name)  # leak: the continue for small ranks skips unpin
            if w is None:
                continue
            if w.rank <= best:
                continue
            best = w.rank
            self.store.unpin(w)
        return best

    def describe(self, name: str) -> str:
        w = self.store.pin(name)  # clean: near miss, finally covers both returns
        if w is None:
            return "missing"
        try:
            if w.rank > self.max_rank:
                return f"{name}: too large"
            return f"{name}: rank {w.rank}"
        finally:
            self.store.unpin(w)

    def reserve_dummy(self, count: int) -> List[int]:
        reserved: List[int] = []
        while len(reserved) < count:
            slot = self.slots.take_slot()  # clean: handed to the caller in the list
            if slot is None:
                break
            reserved.append(slot)
        return reserved

    def profile(self, count: int) -> int:
        slots = self.reserve_dummy(count)  # leak: the first slot is never put back
        for slot in slots[1:]:
            self.slots.put_slot(slot)
        return len(slots)

    def shutdown(self) -> None:
        for request_id in list(self.request_pins):
            self.detach(request_id)
        self.cool_down()
        for name in list(self.active):
            self.deactivate(name)
