from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Optional

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LoRASlot:
    index: int
    adapter_id: Optional[str] = None
    pins: int = 0


class LoRASlotTable:
    def __init__(self, max_loras: int, rank: int, hidden: int) -> None:
        self.a_stacked = torch.zeros(max_loras, rank, hidden)
        self.b_stacked = torch.zeros(max_loras, hidden, rank)
        self._slots = [LoRASlot(i) for i in range(max_loras)]
        self._by_adapter: OrderedDict[str, LoRASlot] = OrderedDict()

    def _victim(self) -> Optional[LoRASlot]:
        for slot in self._slots:
            if slot.adapter_id is None and slot.pins == 0:
                return slot
        for slot in self._by_adapter.values():
            if slot.pins == 0:
                return slot
        return None

    def pin(self, adapter_id: str) -> Optional[LoRASlot]:
        slot = self._by_adapter.get(adapter_id)
        if slot is None:
            slot = self._victim()
            if slot is None:
                return None
            if slot.adapter_id is not None:
                del self._by_adapter[slot.adapter_id]
            slot.adapter_id = adapter_id
            self._by_adapter[adapter_id] = slot
        self._by_adapter.move_to_end(adapter_id)
        slot.pins += 1
        return slot

    def unpin(self, slot: LoRASlot) -> None:
        slot.pins -= 1

    def write(self, slot: LoRASlot, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a_stacked[slot.index].copy_(a)
        self.b_stacked[slot.index].copy_(b)


class AdapterStore:
    def __init__(self) -> None:
        self._weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, adapter_id: str) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        return self._weights.get(adapter_id)

    def put(self, adapter_id: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self._weights[adapter_id] = (a, b)


@dataclass
class LoRARequest:
    request_id: str
    adapter_id: Optional[str]
    slot: Optional[LoRASlot] = None
    finished: bool = False


class LoRAManager:
    def __init__(self, table: LoRASlotTable, store: AdapterStore) -> None:
        self.table = table
        self.store = store
        self.resident: dict[str, LoRASlot] = {}

    def activate(self, adapter_id: str) -> Optional[LoRASlot]:
        slot = self.table.pin(adapter_id)  # leak: an adapter missing from the store returns None with the slot pinned
        if slot is None:
            return None
        weights = self.store.get(adapter_id)
        if weights is None:
            logger.warning("adapter %s is not in the store", adapter_id)
            return None
        self.table.write(slot, *weights)
        return slot

    def make_resident(self, adapter_id: str) -> bool:
        if adapter_id in self.resident:
            return True
        weights = self.store.get(adapter_id)
        if weights is None:
            return False
        slot = self.table.pin(adapter_id)  # clean: pinned on purpose until evict_resident()
        if slot is None:
            return False
        self.table.write(slot, *weights)
        self.resident[adapter_id] = slot
        return True

    def evict_resident(self, adapter_id: str) -> None:
        slot = self.resident.pop(adapter_id, None)
        if slot is not None:
            self.table.unpin(slot)

    def reload(self, adapter_id: str) -> bool:
        slot = self.table.pin(adapter_id)  # clean: near miss, both outcomes come to the unpin below
        if slot is None:
            return False
        weights = self.store.get(adapter_id)
        ok = weights is not None
        if ok:
            self.table.write(slot, *weights)
        self.table.unpin(slot)
        return ok

    def warmup(self, adapter_ids: list[str]) -> int:
        loaded = 0
        for adapter_id in adapter_ids:
            slot = self.table.pin(adapter_id)  # leak: only the last slot of the loop is unpinned
            if slot is None:
                break
            weights = self.store.get(adapter_id)
            if weights is not None:
                self.table.write(slot, *weights)
                loaded += 1
        else:
            if adapter_ids:
                self.table.unpin(slot)
        return loaded

    def swap_weights(self, old_id: str, new_id: str) -> bool:
        old = self.table.pin(old_id)  # leak: stays pinned when there is no slot for the new one
        if old is None:
            return False
        new = self.table.pin(new_id)  # clean: unpinned together with the old one
        if new is None:
            return False
        self.table.a_stacked[new.index].copy_(self.table.a_stacked[old.index])
        self.table.b_stacked[new.index].copy_(self.table.b_stacked[old.index])
        self.table.unpin(new)
        self.table.unpin(old)
        return True

    def merge(self, first: str, second: str, weight: float) -> bool:
        left = self.table.pin(first)  # clean: near miss, given up where the second one cannot be pinned
        if left is None:
            return False
        right = self.table.pin(second)  # clean: unpinned in the finally
        if right is None:
            self.table.unpin(left)
            return False
        try:
            self.table.a_stacked[left.index].lerp_(self.table.a_stacked[right.index], weight)
            self.table.b_stacked[left.index].lerp_(self.table.b_stacked[right.index], weight)
        finally:
            self.table.unpin(right)
            self.table.unpin(left)
        return True


class LoRAScheduler:
    def __init__(self, manager: LoRAManager, max_batch: int) -> None:
        self.manager = manager
        self.max_batch = max_batch
        self.running: dict[str, LoRARequest] = {}

    def admit(self, req: LoRARequest) -> bool:
        if len(self.running) >= self.max_batch:
            return False
        if req.adapter_id is not None:
            req.slot = self.manager.activate(req.adapter_id)  # leak: abort() pops the request without unpinning its slot
            if req.slot is None:
                return False
        self.running[req.request_id] = req
        return True

    def finish(self, request_id: str) -> None:
        req = self.running.pop(request_id)
        req.finished = True
        if req.slot is not None:
            self.manager.table.unpin(req.slot)
            req.slot = None

    def abort(self, request_id: str) -> None:
        req = self.running.pop(request_id, None)
        if req is not None:
            req.finished = True

    def probe(self, adapter_ids: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for adapter_id in adapter_ids:
            slot = self.manager.activate(adapter_id)  # clean: near miss, the index is copied and the pin dropped at once
            if slot is None:
                continue
            found[adapter_id] = slot.index
            self.manager.table.unpin(slot)
        return found

    def slot_for(self, adapter_id: str) -> int:
        slot = self.manager.activate(adapter_id)  # leak: only the index leaves the function
        return -1 if slot is None else slot.index
