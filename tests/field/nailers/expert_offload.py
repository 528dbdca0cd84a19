"""MoE expert weights: device slots with LRU, per-expert locks, background fetch threads."""
from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Optional

import torch


class WeightSlots:
    """Device memory for a fixed number of experts."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._lock = threading.Lock()

    def reserve(self) -> Optional[int]:
        with self._lock:
            return self._free.pop() if self._free else None

    def surrender(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)


class BandwidthTokens:
    """Bounds host-to-device copies in flight."""

    def __init__(self, n: int) -> None:
        self._sem = threading.BoundedSemaphore(n)

    def take(self, block: bool = True) -> bool:
        return self._sem.acquire(blocking=block)  # clean: handed on, put() releases

    def put(self) -> None:
        self._sem.release()


class ExpertStore:
    def __init__(self, slots: WeightSlots, tokens: BandwidthTokens, path: str) -> None:
        self.slots = slots
        self.tokens = tokens
        self.path = path
        self.resident: "OrderedDict[int, int]" = OrderedDict()
        self.locks: dict[int, threading.Lock] = {}
        self.disabled: set[int] = set()
        self.pool = ThreadPoolExecutor(max_workers=4)
        self.futures: dict[int, "Future[Optional[int]]"] = {}

    def _lock_for(self, expert: int) -> threading.Lock:
        return self.locks.setdefault(expert, threading.Lock())

    def _copy(self, expert: int, slot: int) -> int:
        with open(f"{self.path}/{expert}.bin", "rb") as fh:  # clean: closed by with
            return len(fh.read()) + slot

    def _evict_one(self) -> Optional[int]:
        if not self.resident:
            return None
        _, slot = self.resident.popitem(last=False)
        return slot

    def slot_or_evict(self) -> Optional[int]:
        slot = self.slots.reserve()  # clean: handed to the caller, or None
        if slot is None:
            slot = self._evict_one()  # clean: near miss, taken out of the table and handed on
        return slot

    def load(self, expert: int) -> Optional[int]:
        """Make an expert resident and return where it lies."""
        if expert in self.resident:
            self.resident.move_to_end(expert)
            return self.resident[expert]
        slot = self.slot_or_evict()  # clean: recorded in resident, drop() surrenders it
        if slot is None:
            return None
        self.tokens.take()  # clean: put in finally
        try:
            self._copy(expert, slot)
        finally:
            self.tokens.put()
        self.resident[expert] = slot
        return slot

    def drop(self, expert: int) -> bool:
        slot = self.resident.pop(expert, None)
        if slot is None:
            return False
        self.slots.surrender(slot)
        return True

    def load_locked(self, expert: int) -> Optional[int]:
        lock = self._lock_for(expert)
        lock.acquire()  # leak: disabled experts return with their lock held
        if expert in self.disabled:
            return None
        slot = self.load(expert)
        lock.release()
        return slot

    def peek_copy_time(self, expert: int) -> float:
        if not self.tokens.take(block=False):  # leak: the resident case returns without put
            return -1.0
        if expert in self.resident:
            return 0.0
        elapsed = float(self._copy(expert, 0)) * 1e-9
        self.tokens.put()
        return elapsed

    def reload_all(self, experts: list[int]) -> int:
        """Move the named experts to fresh slots, to undo fragmentation."""
        done = 0
        for expert in experts:
            fresh = self.slots.reserve()  # leak: overwrites a resident expert's slot in the table
            if fresh is None:
                break
            self._copy(expert, fresh)
            self.resident[expert] = fresh
            done += 1
        return done

    def migrate(self, expert: int) -> bool:
        fresh = self.slots.reserve()  # clean: near miss, the old slot is surrendered before overwriting
        if fresh is None:
            return False
        self._copy(expert, fresh)
        stale = self.resident.get(expert)
        if stale is not None:
            self.slots.surrender(stale)
        self.resident[expert] = fresh
        return True

    def fetch_background(self, expert: int) -> bool:
        slot = self.slots.reserve()  # clean: near miss, the worker records it or gives it up
        if slot is None:
            return False
        self.futures[expert] = self.pool.submit(self._fetch_into, expert, slot)
        return True

    def _fetch_into(self, expert: int, slot: int) -> Optional[int]:
        with self._lock_for(expert):
            if expert in self.resident or expert in self.disabled:
                self.slots.surrender(slot)
                return None
            self._copy(expert, slot)
            self.resident[expert] = slot
            return slot

    def fetch_hinted(self, expert: int) -> bool:
        slot = self.slots.reserve()  # leak: the worker ends for a resident expert without the slot
        if slot is None:
            return False
        self.futures[expert] = self.pool.submit(self._fetch_hint, expert, slot)
        return True

    def _fetch_hint(self, expert: int, slot: int) -> Optional[int]:
        with self._lock_for(expert):
            if expert in self.resident:
                return None
            self._copy(expert, slot)
            self.resident[expert] = slot
            return slot

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for expert in list(self.resident):
            self.drop(expert)


class LayerWorkspace:
    """Slots held for the shared experts of one layer."""

    def __init__(self, store: ExpertStore, width: int) -> None:
        self.store = store
        self.width = width
        self.slots: list[int] = []
        self.spare: Optional[int] = None

    def open(self, with_spare: bool) -> bool:
        for _ in range(self.width):
            slot = self.store.slots.reserve()  # clean: in self.slots, close() surrenders, also on failure
            if slot is None:
                self.close()
                return False
            self.slots.append(slot)
        if with_spare:
            self.spare = self.store.slots.reserve()  # leak: close() only knows about self.slots
        return True

    def close(self) -> None:
        for slot in self.slots:
            self.store.slots.surrender(slot)
        self.slots.clear()
        self.spare = None

    def pick(self, logits: torch.Tensor) -> int:
        index = int(logits.argmax()) % max(len(self.slots), 1)
        return self.slots[index]


def open_workspace(store: ExpertStore, width: int) -> Optional[LayerWorkspace]:
    ws = LayerWorkspace(store, width)
    if not ws.open(with_spare=False):  # clean: handed to the caller inside ws
        return None
    return ws


def route_many(store: ExpertStore, width: int, rows: list[torch.Tensor]) -> list[int]:
    ws = open_workspace(store, width)  # leak: an empty batch returns before close()
    if ws is None:
        return []
    if not rows:
        return []
    picks = [ws.pick(row) for row in rows]
    ws.close()
    return picks
