"""LoRA adapters in a fixed number of device slots, shared by running requests."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class LoraSlot:
    index: int
    adapter: Optional[str] = None
    pins: int = 0


@dataclass
class GenRequest:
    rid: str
    adapter: Optional[str]
    slot: Optional[LoraSlot] = None
    extra_slots: tuple[LoraSlot, ...] = ()
    done: bool = False


class AdapterSlots:
    def __init__(self, count: int, rank: int, hidden: int) -> None:
        self.weights = torch.zeros(count, rank, hidden)
        self._empty = [LoraSlot(i) for i in range(count)]
        self._loaded: OrderedDict[str, LoraSlot] = OrderedDict()

    def pin_adapter(self, adapter: str) -> Optional[LoraSlot]:
        slot = self._loaded.get(adapter)
        if slot is None:
            slot = self._obtain()
            if slot is None:
                return None
            slot.adapter = adapter
            self._loaded[adapter] = slot
        slot.pins += 1
        self._loaded.move_to_end(adapter)
        return slot

    def _obtain(self) -> Optional[LoraSlot]:
        if self._empty:
            return self._empty.pop()
        for name, slot in self._loaded.items():
            if slot.pins == 0:
                return self._loaded.pop(name)
        return None

    def unpin_adapter(self, slot: LoraSlot) -> None:
        slot.pins -= 1

    def preload(self, adapter: str, weight: torch.Tensor) -> bool:
        if adapter in self._loaded or not self._empty:
            return False
        slot = self._empty.pop()  # leak: a weight of another rank returns False, the slot is in neither container
        if weight.shape != self.weights[slot.index].shape:
            return False
        self.weights[slot.index].copy_(weight)
        slot.adapter = adapter
        self._loaded[adapter] = slot
        return True


class AdapterScheduler:
    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.running: dict[str, GenRequest] = {}
        self.paused: dict[str, GenRequest] = {}
        self.default: Optional[LoraSlot] = None

    def admit(self, req: GenRequest) -> bool:
        if req.rid in self.running:
            return False
        if req.adapter is not None:
            req.slot = self.slots.pin_adapter(req.adapter)  # clean: near miss, requests without adapter hold nothing, the others are unpinned by _detach
            if req.slot is None:
                return False
        self.running[req.rid] = req
        return True

    def admit_merged(self, req: GenRequest, others: list[str]) -> bool:
        if req.rid in self.running:
            return False
        held: list[LoraSlot] = []
        for name in others:
            slot = self.slots.pin_adapter(name)  # clean: near miss, rolled back when one is missing, else kept in extra_slots
            if slot is None:
                for other in held:
                    self.slots.unpin_adapter(other)
                return False
            held.append(slot)
        req.extra_slots = tuple(held)
        self.running[req.rid] = req
        return True

    def _detach(self, req: GenRequest) -> None:
        if req.slot is not None:
            self.slots.unpin_adapter(req.slot)
            req.slot = None
        for slot in req.extra_slots:
            self.slots.unpin_adapter(slot)
        req.extra_slots = ()

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            self._detach(req)
            req.done = True

    def pause(self, rid: str) -> None:
        req = self.running.pop(rid)
        self._detach(req)
        self.paused[rid] = req

    def resume(self, rid: str) -> bool:
        req = self.paused.get(rid)
        if req is None or req.adapter is None:
            return False
        slot = self.slots.pin_adapter(req.adapter)  # leak: a request marked done while paused is dropped together with the pin
        if slot is None:
            return False
        del self.paused[rid]
        if req.done:
            return False
        req.slot = slot
        self.running[rid] = req
        return True

    def switch_adapter(self, rid: str, adapter: str) -> bool:
        req = self.running[rid]
        fresh = self.slots.pin_adapter(adapter)  # clean: near miss, the old slot is unpinned before the field is set
        if fresh is None:
            return False
        if req.slot is not None:
            self.slots.unpin_adapter(req.slot)
        req.slot, req.adapter = fresh, adapter
        return True

    def upgrade_adapter(self, rid: str, adapter: str) -> bool:
        req = self.running[rid]
        req.slot = self.slots.pin_adapter(adapter)  # leak: the slot the request ran with is overwritten while pinned
        req.adapter = adapter
        return req.slot is not None

    def set_default(self, adapter: str) -> bool:
        if self.default is not None:
            if self.default.adapter == adapter:
                return True
            self.slots.unpin_adapter(self.default)
        self.default = self.slots.pin_adapter(adapter)  # clean: near miss, the one before is unpinned, clear_default unpins this one
        return self.default is not None

    def clear_default(self) -> None:
        if self.default is not None:
            self.slots.unpin_adapter(self.default)
            self.default = None

    def can_serve(self, adapters: list[str]) -> bool:
        got: list[LoraSlot] = []
        for name in adapters:
            slot = self.slots.pin_adapter(name)  # leak: a missing slot answers False with the earlier ones pinned
            if slot is None:
                return False
            got.append(slot)
        for slot in got:
            self.slots.unpin_adapter(slot)
        return True

    def copy_weights(self, adapter: str) -> Optional[torch.Tensor]:
        slot = self._pinned(adapter)  # leak: only the weights are copied, the pin of the slot is forgotten
        if slot is None:
            return None
        return self.slots.weights[slot.index].clone()

    def norm(self, adapter: str) -> float:
        slot = self._pinned(adapter)  # clean: near miss, unpinned after the norm, None holds nothing
        if slot is None:
            return 0.0
        value = float(self.slots.weights[slot.index].norm())
        self.slots.unpin_adapter(slot)
        return value

    def _pinned(self, adapter: str) -> Optional[LoraSlot]:
        if adapter.startswith("base:"):
            return None
        return self.slots.pin_adapter(adapter)  # clean: handed to the caller
