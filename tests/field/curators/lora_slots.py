"""GPU adapter slots for multi-LoRA serving: residency, pinning, eviction."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Set

import torch

logger = logging.getLogger(__name__)


@dataclass
class AdapterWeights:
    name: str
    rank: int
    tensors: Dict[str, torch.Tensor] = field(default_factory=dict)


class SlotTable:
    """Owns `capacity` adapter slots of the stacked LoRA weights."""

    def __init__(self, capacity: int) -> None:
        self._free: List[int] = list(range(capacity))[::-1]

    def acquire(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def __len__(self) -> int:
        return len(self._free)


class AdapterRegistry:
    def __init__(self, slots: SlotTable, max_rank: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.resident: "OrderedDict[str, int]" = OrderedDict()
        self.pins: Dict[str, int] = {}
        self.scratch_slot: Optional[int] = None

    def pin(self, name: str) -> int:
        self.pins[name] = self.pins.get(name, 0) + 1
        self.resident.move_to_end(name)
        return self.resident[name]

    def unpin(self, name: str) -> None:
        left = self.pins[name] - 1
        if left:
            self.pins[name] = left
        else:
            del self.pins[name]

    def _evict_one(self) -> bool:
        for name in self.resident:
            if name not in self.pins:
                self.slots.release(self.resident.pop(name))
                return True
        return False

    def _slot(self) -> Optional[int]:
        slot = self.slots.acquire()  # clean: handed on to the caller
        if slot is None and self._evict_one():
            slot = self.slots.acquire()  # clean: near miss, overwrites None only and is handed on
        return slot

    def load(self, weights: AdapterWeights) -> bool:
        if weights.name in self.resident:
            return True
        slot = self._slot()  # leak: the rank check comes after the slot was taken and returns without release
        if slot is None:
            return False
        if weights.rank > self.max_rank:
            logger.warning("adapter %s has rank %d > %d", weights.name, weights.rank, self.max_rank)
            return False
        self.resident[weights.name] = slot
        return True

    def reload(self, weights: AdapterWeights) -> bool:
        slot = self._slot()  # leak: the older slot under the same name is overwritten and never released
        if slot is None:
            return False
        self.resident[weights.name] = slot
        return True

    def swap_in(self, weights: AdapterWeights) -> bool:
        slot = self._slot()  # clean: near miss, the older slot under the name is popped and released first
        if slot is None:
            return False
        old = self.resident.pop(weights.name, None)
        if old is not None:
            self.slots.release(old)
        self.resident[weights.name] = slot
        return True

    def unload(self, name: str) -> bool:
        if name in self.pins or name not in self.resident:
            return False
        self.slots.release(self.resident.pop(name))
        return True

    def merge_scratch(self, names: List[str]) -> Optional[int]:
        if self.scratch_slot is None:
            self.scratch_slot = self.slots.acquire()  # clean: near miss, guarded by None and released in close
        if self.scratch_slot is None:
            return None
        logger.debug("merging %s into slot %d", names, self.scratch_slot)
        return self.scratch_slot

    def close(self) -> None:
        for slot in self.resident.values():
            self.slots.release(slot)
        self.resident.clear()
        if self.scratch_slot is not None:
            self.slots.release(self.scratch_slot)
            self.scratch_slot = None


@dataclass
class LoraRequest:
    request_id: str
    adapter: Optional[str]
    slot: int = -1
    draft_adapter: Optional[str] = None
    prefilled: bool = False


class LoraRunner:
    def __init__(self, registry: AdapterRegistry, store: Mapping[str, AdapterWeights]) -> None:
        self.registry = registry
        self.store = store
        self.active: Dict[str, LoraRequest] = {}
        self.failed: Set[str] = set()

    def begin(self, req: LoraRequest) -> bool:
        if req.adapter is None:
            req.draft_adapter = None
            self.active[req.request_id] = req
            return True
        if not self.registry.load(self.store[req.adapter]):  # clean: near miss, slot stays owned by the registry until eviction
            self.failed.add(req.request_id)
            return False
        req.slot = self.registry.pin(req.adapter)  # leak: a draft adapter that cannot be loaded returns without unpin
        if req.draft_adapter is not None:
            if not self.registry.load(self.store[req.draft_adapter]):  # clean: the registry owns the resident slot
                self.failed.add(req.request_id)
                return False
            self.registry.pin(req.draft_adapter)  # clean: near miss, end unpins it under the same condition
        self.active[req.request_id] = req
        return True

    def end(self, request_id: str) -> None:
        req = self.active.pop(request_id, None)
        if req is None or req.adapter is None:
            return
        self.registry.unpin(req.adapter)
        if req.draft_adapter is not None:
            self.registry.unpin(req.draft_adapter)

    def switch(self, request_id: str, adapter: str) -> bool:
        req = self.active[request_id]
        if adapter not in self.registry.resident:
            return False
        slot = self.registry.pin(adapter)  # clean: near miss, the earlier pin is dropped and end unpins the new one
        if req.adapter is not None:
            self.registry.unpin(req.adapter)
        req.adapter, req.slot = adapter, slot
        return True

    def batch_slots(self, requests: List[LoraRequest]) -> List[int]:
        pinned: List[str] = []
        slots: List[int] = []
        for req in requests:
            if req.adapter is None or req.adapter not in self.registry.resident:
                slots.append(-1)
                continue
            slots.append(self.registry.pin(req.adapter))  # leak: one pin per request, but the set unpins each name once
            pinned.append(req.adapter)
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        for name in set(pinned):
            self.registry.unpin(name)
        return slots

    def profile(self, names: List[str]) -> Dict[str, int]:
        seen: Dict[str, int] = {}
        for name in names:
            if name not in self.registry.resident:
                continue
            seen[name] = self.registry.pin(name)  # clean: near miss, unpinned in the same turn of the loop
            self.registry.unpin(name)
        return seen
