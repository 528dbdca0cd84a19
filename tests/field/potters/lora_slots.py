"""LoRA adapter slots: a class hierarchy of slot managers with pin counts."""
from __future__ import annotations

import abc
from collections import OrderedDict
from typing import Dict, List, Optional, Sequence, Tuple


class AdapterSlot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.adapter_id: Optional[int] = None
        self.pins = 0
        self.weights: Tuple[float, ...] = ()


class SlotManager(abc.ABC):
    """Base: slots come from _claim, go back with _surrender; pins keep a slot from eviction."""

    def __init__(self, num_slots: int) -> None:
        self._vacant = [AdapterSlot(i) for i in range(num_slots)]
        self.active: "OrderedDict[int, AdapterSlot]" = OrderedDict()

    def _claim(self) -> Optional[AdapterSlot]:
        return self._vacant.pop() if self._vacant else None

    def _surrender(self, slot: AdapterSlot) -> None:
        slot.adapter_id = None
        slot.weights = ()
        self._vacant.append(slot)

    def pin(self, adapter_id: int) -> AdapterSlot:
        slot = self.active[adapter_id]
        slot.pins += 1
        return slot

    def unpin(self, slot: AdapterSlot) -> None:
        slot.pins -= 1

    @abc.abstractmethod
    def load(self, adapter_id: int, weights: Sequence[float]) -> bool:
        ...

    def unload(self, adapter_id: int) -> bool:
        slot = self.active.pop(adapter_id, None)
        if slot is None:
            return False
        self._surrender(slot)
        return True


class EagerSlotManager(SlotManager):
    def load(self, adapter_id: int, weights: Sequence[float]) -> bool:
        slot = self._claim()  # leak: a rank-zero adapter is refused after the slot was claimed
        if slot is None:
            return False
        if not weights:
            return False
        slot.adapter_id = adapter_id
        slot.weights = tuple(weights)
        old = self.active.pop(adapter_id, None)
        if old is not None:
            self._surrender(old)
        self.active[adapter_id] = slot
        return True


class LruSlotManager(SlotManager):
    def _evict_one(self) -> bool:
        for adapter_id, slot in self.active.items():
            if slot.pins == 0:
                return self.unload(adapter_id)
        return False

    def load(self, adapter_id: int, weights: Sequence[float]) -> bool:
        if adapter_id in self.active:
            self.active.move_to_end(adapter_id)
            return True
        slot = self._claim()  # clean: near miss, the loop only claims again while there is none
        while slot is None:
            if not self._evict_one():
                return False
            slot = self._claim()  # clean: ends up in active
        try:
            slot.weights = tuple(float(w) for w in weights)
        except (TypeError, ValueError):
            self._surrender(slot)
            return False
        slot.adapter_id = adapter_id
        self.active[adapter_id] = slot
        return True


class CheckedSlotManager(LruSlotManager):
    """Validates a checksum after the copy."""

    def load_checked(self, adapter_id: int, weights: Sequence[float], expect: float) -> bool:
        slot = self._claim()  # leak: a failed checksum is reported without surrendering the slot
        if slot is None:
            return self.load(adapter_id, weights)
        try:
            slot.weights = tuple(weights)
            if abs(sum(slot.weights) - expect) > 1e-6:
                raise ValueError("checksum")
        except ValueError:
            slot.weights = ()
            return False
        slot.adapter_id = adapter_id
        previous = self.active.pop(adapter_id, None)
        if previous is not None:
            self._surrender(previous)
        self.active[adapter_id] = slot
        return True


class LoraRequest:
    def __init__(self, rid: int, adapter_id: int) -> None:
        self.rid = rid
        self.adapter_id = adapter_id
        self.slot: Optional[AdapterSlot] = None


class LoraBatcher:
    def __init__(self, manager: SlotManager) -> None:
        self.manager = manager

    def attach(self, req: LoraRequest) -> None:
        self.detach(req)
        req.slot = self.manager.pin(req.adapter_id)  # clean: rides in the request, detach unpins

    def detach(self, req: LoraRequest) -> None:
        if req.slot is not None:
            self.manager.unpin(req.slot)
            req.slot = None

    def switch(self, req: LoraRequest, adapter_id: int) -> None:
        """Move a request to another adapter between turns."""
        fresh = self.manager.pin(adapter_id)  # clean: near miss, detach drops the old pin before the field is set
        self.detach(req)
        req.adapter_id = adapter_id
        req.slot = fresh

    def indices(self, reqs: List[LoraRequest]) -> List[int]:
        """Slot index per request for the grouped GEMM."""
        out = []
        for req in reqs:
            slot = self.manager.pin(req.adapter_id)  # leak: requests without weights are skipped while pinned
            if not slot.weights:
                out.append(-1)
                continue
            out.append(slot.index)
            self.manager.unpin(slot)
        return out

    def merged_norm(self, a: int, b: int) -> Optional[float]:
        left = self.manager.pin(a)  # leak: stays pinned when b is not loaded
        try:
            right = self.manager.pin(b)  # clean: unpinned in finally
        except KeyError:
            return None
        try:
            return sum(left.weights) + sum(right.weights)
        finally:
            self.manager.unpin(right)
            self.manager.unpin(left)

    def preload(self, adapter_ids: List[int], keep: bool) -> List[AdapterSlot]:
        """Pins what is resident; with keep the caller unpins, otherwise this is only a touch."""
        pinned = [self.manager.pin(i) for i in adapter_ids if i in self.manager.active]  # clean: near miss, given to the caller or unpinned here
        if keep:
            return pinned
        for slot in pinned:
            self.manager.unpin(slot)
        return []

    def resident(self, adapter_ids: List[int]) -> int:
        return len(self.preload(adapter_ids, keep=True))  # leak: the pinned list is only counted
