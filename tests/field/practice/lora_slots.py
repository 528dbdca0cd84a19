"""LoRA adapters: host cache of weights plus a few device slots, with pinning by running batches."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from typing import Iterable, Mapping

import torch

logger = logging.getLogger(__name__)

MAX_RANK = 64


class AdapterSlots:
    def __init__(self, n: int, dim: int) -> None:
        self.a = torch.zeros(n, MAX_RANK, dim)
        self.b = torch.zeros(n, dim, MAX_RANK)
        self._vacant = set(range(n))

    def allocate_slot(self) -> int | None:
        return self._vacant.pop() if self._vacant else None

    def free_slot(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._vacant.add(slot)


class AdapterManager:
    def __init__(self, slots: AdapterSlots, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.slots = slots
        self.weights = weights
        self.active: OrderedDict[str, int] = OrderedDict()
        self.pins: defaultdict[str, int] = defaultdict(int)
        self.staging: int | None = None
        self._mu = threading.Lock()

    def pin_adapter(self, name: str) -> None:
        self.pins[name] += 1

    def unpin_adapter(self, name: str) -> None:
        self.pins[name] -= 1

    def _evict_one(self) -> bool:
        for name in self.active:
            if self.pins[name] == 0:
                self.slots.free_slot(self.active.pop(name))
                return True
        return False

    def activate(self, name: str) -> int | None:
        if name in self.active:
            self.active.move_to_end(name)
            return self.active[name]
        slot = self.slots.allocate_slot()  # clean: near miss, None here means nothing is held when it asks again
        if slot is None:
            if not self._evict_one():
                return None
            slot = self.slots.allocate_slot()  # clean: stored as active, deactivate_all() and eviction free it
        wa, wb = self.weights[name]
        self.slots.a[slot, : wa.shape[0]].copy_(wa)
        self.slots.b[slot, :, : wb.shape[1]].copy_(wb)
        self.active[name] = slot
        return slot

    def deactivate_all(self) -> None:
        while self.active:
            _, slot = self.active.popitem()
            self.slots.free_slot(slot)

    def load_checked(self, name: str) -> int | None:
        if name in self.active:
            return self.active[name]
        slot = self.slots.allocate_slot()  # leak: a rank over the maximum is refused with the slot gone
        if slot is None:
            return None
        wa, wb = self.weights[name]
        if wa.shape[0] > MAX_RANK:
            logger.error("adapter %s has rank %d", name, wa.shape[0])
            return None
        self.slots.a[slot, : wa.shape[0]].copy_(wa)
        self.active[name] = slot
        return slot

    def stage(self, name: str) -> None:
        if self.staging is None:
            self.staging = self.slots.allocate_slot()  # clean: near miss, allocated once; commit() moves it, discard() frees it
        if self.staging is not None:
            self.slots.a[self.staging, : self.weights[name][0].shape[0]].copy_(self.weights[name][0])

    def commit(self, name: str) -> bool:
        if self.staging is None or name in self.active:
            return False
        self.active[name], self.staging = self.staging, None
        return True

    def discard(self) -> None:
        if self.staging is not None:
            self.slots.free_slot(self.staging)
        self.staging = None

    # ---- pins ---------------------------------------------------------
    def run_batch(self, names: Iterable[str], step) -> torch.Tensor | None:
        held = []
        for n in names:
            self.pin_adapter(n)  # leak: an adapter without slot returns from the middle of the loop
            if self.activate(n) is None:
                return None
            held.append(n)
        out = step([self.active[n] for n in held])
        for n in held:
            self.unpin_adapter(n)
        return out

    def run_batch_grouped(self, names: Iterable[str], step) -> torch.Tensor | None:
        held = []
        try:
            for n in names:
                self.pin_adapter(n)  # clean: near miss, appended before anything can return, finally unpins
                held.append(n)
                if self.activate(n) is None:
                    return None
            return step([self.active[n] for n in held])
        finally:
            for n in held:
                self.unpin_adapter(n)

    def warm(self, name: str) -> bool:
        self.pin_adapter(name)  # clean: unpinned before every return
        ok = self.activate(name) is not None
        if not ok:
            self.unpin_adapter(name)
            return False
        self.unpin_adapter(name)
        return True

    def exclusive(self, name: str) -> bool:
        self._mu.acquire()  # leak: a pinned adapter returns under the lock
        if self.pins[name]:
            return False
        slot = self.active.pop(name, None)
        if slot is not None:
            self.slots.free_slot(slot)
        self._mu.release()
        return True

    def try_exclusive(self, name: str) -> bool:
        if not self._mu.acquire(blocking=False):  # clean: near miss, not taken in the early return
            return False
        hit = name in self.active
        self._mu.release()
        return hit

    def merge(self, names: list[str]) -> torch.Tensor:
        tmp = self.slots.allocate_slot()  # leak: `tmp` is reused as a name for the merged delta
        if tmp is None:
            raise RuntimeError("no vacant slot")
        for n in names:
            wa, _ = self.weights[n]
            self.slots.a[tmp, : wa.shape[0]].add_(wa)
        tmp = self.slots.a[tmp].clone() / len(names)
        return tmp
