from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass
class Adapter:
    name: str
    rank: int
    weights: dict[str, Tensor]


@dataclass
class Request:
    request_id: str
    adapter: Optional[str]
    slot: Optional[int] = None
    fallback_slot: Optional[int] = None
    done: bool = False


class SlotTable:
    def __init__(self, num_slots: int):
        self._lock = threading.Lock()
        self._free = list(range(num_slots))
        self._pins: dict[int, int] = {}

    def take(self) -> Optional[int]:
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._pins[slot] = 1
            return slot

    def pin(self, slot: int) -> int:
        with self._lock:
            self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        with self._lock:
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]
                self._free.append(slot)

    def pins(self, slot: int) -> int:
        return self._pins.get(slot, 0)


class AdapterManager:
    def __init__(self, table: SlotTable, stacked: dict[str, Tensor], fetch: Callable[[str], Adapter]):
        self.table = table
        self.stacked = stacked
        self.fetch = fetch
        self._loaded: OrderedDict[str, int] = OrderedDict()
        self._static: list[int] = []

    def _copy_in(self, slot: int, adapter: Adapter) -> None:
        for key, w in adapter.weights.items():
            self.stacked[key][slot].zero_()
            self.stacked[key][slot, : w.shape[0]].copy_(w)

    def _evict_one(self) -> bool:
        for name, slot in self._loaded.items():
            if self.table.pins(slot) == 1:
                del self._loaded[name]
                self.table.unpin(slot)
                return True
        return False

    def activate(self, name: str) -> Optional[int]:
        slot = self._loaded.get(name)
        if slot is not None:
            self._loaded.move_to_end(name)
            return self.table.pin(slot)  # clean: the pin is the caller's
        evicted = False
        slot = self.table.take()  # clean: near miss, evicted is still False whenever this one succeeds and the handler unpins it
        if slot is None:
            evicted = self._evict_one()
            if not evicted:
                return None
            slot = self.table.take()  # leak: the handler for a failed fetch unpins only if nothing was evicted
            if slot is None:
                return None
        try:
            self._copy_in(slot, self.fetch(name))
        except (OSError, KeyError) as exc:
            logger.warning("adapter %s: %s", name, exc)
            if not evicted:
                self.table.unpin(slot)
            return None
        self._loaded[name] = slot
        return self.table.pin(slot)  # clean: near miss, the cache has its own pin and the caller this one

    def preload(self, names: list[str]) -> int:
        for name in names:
            slot = self.table.take()  # clean: near miss, the failing fetch unpins and the good one lands in _static, which shutdown() empties
            if slot is None:
                break
            try:
                self._copy_in(slot, self.fetch(name))
            except OSError:
                self.table.unpin(slot)
                continue
            self._static.append(slot)
        return len(self._static)

    def refresh(self, name: str) -> bool:
        old = self._loaded.get(name)
        if old is None:
            return False
        slot = self.table.take()  # leak: an unchanged rank returns True with the new slot unused and kept
        if slot is None:
            return False
        adapter = self.fetch(name)
        if adapter.rank == self.stacked["lora_a"].shape[1]:
            self._copy_in(old, adapter)
            return True
        self._copy_in(slot, adapter)
        self._loaded[name] = slot
        self.table.unpin(old)
        return True

    def replace(self, name: str, adapter: Adapter) -> bool:
        slot = self.table.take()  # clean: near miss, the previous slot of the name is unpinned after the swap
        if slot is None:
            return False
        self._copy_in(slot, adapter)
        old = self._loaded.pop(name, None)
        self._loaded[name] = slot
        if old is not None:
            self.table.unpin(old)
        return True

    def remove(self, name: str) -> bool:
        slot = self._loaded.pop(name, None)
        if slot is None:
            return False
        self.table.unpin(slot)
        return True

    def shutdown(self) -> None:
        for slot in self._loaded.values():
            self.table.unpin(slot)
        self._loaded.clear()
        for slot in self._static:
            self.table.unpin(slot)
        self._static.clear()


class LoraBatcher:
    def __init__(self, manager: AdapterManager, max_batch: int):
        self.manager = manager
        self.max_batch = max_batch
        self.active: dict[str, Request] = {}

    def admit(self, req: Request, fallback: Optional[str] = None) -> bool:
        if req.adapter is None:
            self.active[req.request_id] = req
            return True
        req.slot = self.manager.activate(req.adapter)  # clean: near miss, an admitted request gives it back in complete() or cancel()
        if req.slot is None:
            return False
        if fallback is not None:
            req.fallback_slot = self.manager.activate(fallback)  # leak: cancel() returns only req.slot
        self.active[req.request_id] = req
        return True

    def admit_group(self, reqs: list[Request]) -> bool:
        taken: list[Request] = []
        for req in reqs:
            req.slot = self.manager.activate(req.adapter or "base")  # leak: a group that does not fit is turned away with the slots of the earlier members
            if req.slot is None:
                return False
            taken.append(req)
        for req in taken:
            self.active[req.request_id] = req
        return True

    def mapping(self, reqs: list[Request]) -> list[int]:
        slots: list[int] = []
        for req in reqs:
            if req.slot is None:
                slots.append(-1)
                continue
            slots.append(self.manager.table.pin(req.slot))  # clean: near miss, the finally of run() unpins all that is not -1
        return slots

    def run(self, forward: Callable[[list[int]], None]) -> None:
        reqs = list(self.active.values())[: self.max_batch]
        slots = self.mapping(reqs)  # clean: near miss, unpinned in the finally
        try:
            forward(slots)
        finally:
            for slot in slots:
                if slot >= 0:
                    self.manager.table.unpin(slot)

    def warmup(self, name: str, forward: Callable[[list[int]], bool]) -> bool:
        slot = self.manager.activate(name)  # leak: the return inside the loop after a good run skips the unpin
        if slot is None:
            return False
        for _ in range(3):
            if forward([slot]):
                return True
        self.manager.table.unpin(slot)
        return False

    def complete(self, request_id: str) -> None:
        req = self.active.pop(request_id)
        for slot in (req.slot, req.fallback_slot):
            if slot is not None:
                self.manager.table.unpin(slot)
        req.slot = req.fallback_slot = None
        req.done = True

    def cancel(self, request_id: str) -> bool:
        req = self.active.pop(request_id, None)
        if req is None:
            return False
        if req.slot is not None:
            self.manager.table.unpin(req.slot)
            req.slot = None
        return True
