"""Adapter slots for multi-LoRA serving: loading, pinning, eviction and batching."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Iterable

logger = logging.getLogger(__name__)


class AdapterNotFound(KeyError):
    pass


@dataclass
class Slot:
    index: int
    adapter: str | None = None
    pins: int = 0


@dataclass
class LoraRequest:
    request_id: str
    adapter: str
    slot: Slot | None = None
    draft_slot: Slot | None = None
    children: list["LoraRequest"] = field(default_factory=list)


class SlotTable:
    """Fixed number of GPU slots. pin() keeps an adapter resident until unpin()."""

    def __init__(self, n: int, load: Callable[[str, int], bool]) -> None:
        self._slots = [Slot(i) for i in range(n)]
        self._free = [s.index for s in self._slots]
        self._resident: OrderedDict[str, Slot] = OrderedDict()
        self._load = load
        self._lock = threading.RLock()

    def pin(self, adapter: str) -> Slot | None:
        with self._lock:
            slot = self._resident.get(adapter)
            if slot is None:
                slot = self._bring_in(adapter)
                if slot is None:
                    return None
            self._resident.move_to_end(adapter)
            slot.pins += 1
            return slot

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            slot.pins -= 1

    def _evict(self) -> bool:
        for name, slot in self._resident.items():
            if slot.pins == 0:
                del self._resident[name]
                slot.adapter = None
                self._free.append(slot.index)
                return True
        return False

    def _bring_in(self, adapter: str) -> Slot | None:
        if not self._free and not self._evict():
            return None
        index = self._free.pop()  # leak: a failed load returns None and the index never gets back to the free list
        slot = self._slots[index]
        if not self._load(adapter, index):
            logger.warning("adapter %s failed to load", adapter)
            return None
        slot.adapter = adapter
        self._resident[adapter] = slot
        return slot

    def replace(self, adapter: str) -> bool:
        """Load a fresh version of an adapter into another slot, then retire the old one."""
        with self._lock:
            if not self._free:
                return False
            index = self._free.pop()  # clean: near miss, appended again when the load fails, else resident
            if not self._load(adapter, index):
                self._free.append(index)
                return False
            old = self._resident.get(adapter)
            if old is not None and old.pins:
                self._free.append(index)
                return False
            if old is not None:
                old.adapter = None
                self._free.append(old.index)
            self._slots[index].adapter = adapter
            self._resident[adapter] = self._slots[index]
            return True


class LoraScheduler:
    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.active: dict[str, LoraRequest] = {}
        self.pinned_defaults: list[Slot] = []

    def preload(self, names: Iterable[str]) -> None:
        for name in names:
            slot = self.table.pin(name)  # clean: the non-None ones are kept in pinned_defaults till shutdown
            if slot is None:
                logger.warning("no slot for default adapter %s", name)
                continue
            self.pinned_defaults.append(slot)

    def submit(self, req: LoraRequest) -> bool:
        slot = self.table.pin(req.adapter)  # leak: a duplicate request id is turned away with the pin still held
        if slot is None:
            return False
        if req.request_id in self.active:
            logger.info("duplicate %s", req.request_id)
            return False
        req.slot = slot
        self.active[req.request_id] = req
        return True

    def enable_draft(self, req: LoraRequest, draft: str) -> bool:
        if req.draft_slot is not None:
            return True
        req.draft_slot = self.table.pin(draft)  # leak: abort() unpins only req.slot and drops the request
        return req.draft_slot is not None

    def spawn(self, parent: LoraRequest, n: int) -> int:
        for i in range(n):
            slot = self.table.pin(parent.adapter)  # clean: near miss, goes with the child, whom finish() and abort() visit
            if slot is None:
                return i
            parent.children.append(LoraRequest(f"{parent.request_id}.{i}", parent.adapter, slot))
        return n

    def _unpin_tree(self, req: LoraRequest) -> None:
        if req.slot is not None:
            self.table.unpin(req.slot)
            req.slot = None
        for child in req.children:
            self._unpin_tree(child)
        req.children.clear()

    def finish(self, request_id: str) -> None:
        req = self.active.pop(request_id)
        self._unpin_tree(req)
        if req.draft_slot is not None:
            self.table.unpin(req.draft_slot)
            req.draft_slot = None

    def abort(self, request_id: str) -> None:
        req = self.active.pop(request_id, None)
        if req is not None:
            self._unpin_tree(req)

    def switch_adapter(self, req: LoraRequest, adapter: str) -> bool:
        fresh = self.table.pin(adapter)  # clean: near miss, the old pin is dropped before the field is overwritten
        if fresh is None:
            return False
        if req.slot is not None:
            self.table.unpin(req.slot)
        req.slot = fresh
        req.adapter = adapter
        return True

    def resident_index(self, adapter: str) -> int:
        slot = self.table.pin(adapter)  # leak: the index is read off and the pin forgotten
        if slot is None:
            raise AdapterNotFound(adapter)
        return slot.index

    def batch_indices(self, reqs: list[LoraRequest]) -> list[int]:
        out = []
        for r in reqs:
            out.append(r.slot.index if r.slot is not None else self.resident_index(r.adapter))
        return out

    def shutdown(self) -> None:
        for rid in list(self.active):
            self.finish(rid)
        while self.pinned_defaults:
            self.table.unpin(self.pinned_defaults.pop())
