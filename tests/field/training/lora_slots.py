"""Adapter slots for multi-LoRA fine-tuning; weights of an adapter live in a slot of a stacked tensor."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Dict, Iterable, List, Optional, Union

import torch
from torch import nn

logger = logging.getLogger(__name__)


class Ownership(str, Enum):
    OWNED = "owned"
    BORROWED = "borrowed"


class SlotError(Exception):
    pass


class AdapterSlots:
    def __init__(self, n: int, rank: int, dim: int) -> None:
        self.a = torch.zeros(n, rank, dim)
        self.b = torch.zeros(n, dim, rank)
        self._taken: List[bool] = [False] * n

    def reserve_slot(self, preferred: Optional[int] = None) -> int:
        order: Iterable[int] = range(len(self._taken))
        if preferred is not None:
            order = [preferred]
        for i in order:
            if not self._taken[i]:
                self._taken[i] = True
                return i
        raise SlotError("adapter slots exhausted")

    def unreserve_slot(self, i: int) -> None:
        self._taken[i] = False
        self.a[i].zero_()
        self.b[i].zero_()


@dataclass
class Adapter:
    name: str
    slot: int
    mode: Ownership

    def is_owner(self) -> bool:
        return self.mode is Ownership.OWNED


class AdapterManager:
    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.active: Dict[str, Adapter] = {}

    def load(self, name: str, weights: Dict[str, torch.Tensor]) -> Adapter:
        if name in self.active:
            return self.active[name]
        slot = self.slots.reserve_slot()  # leak: missing weights raise after the reservation
        if "lora_a" not in weights or "lora_b" not in weights:
            raise KeyError(f"{name}: incomplete adapter")
        self.slots.a[slot].copy_(weights["lora_a"])
        self.slots.b[slot].copy_(weights["lora_b"])
        adapter = Adapter(name, slot, Ownership.OWNED)
        self.active[name] = adapter
        return adapter

    def attach(self, name: str, slot: Union[int, None] = None) -> Adapter:
        mode = Ownership.BORROWED
        if slot is None:
            slot = self.slots.reserve_slot()  # clean: near miss, only owned adapters unreserve and this one is marked owned
            mode = Ownership.OWNED
        adapter = Adapter(name, slot, mode)
        self.replace(name, adapter)
        return adapter

    def replace(self, name: str, adapter: Adapter) -> None:
        old = self.active.pop(name, None)
        if old is not None and old.is_owner():
            self.slots.unreserve_slot(old.slot)
        self.active[name] = adapter

    def unload(self, name: str) -> None:
        adapter = self.active.pop(name)
        if adapter.is_owner():
            self.slots.unreserve_slot(adapter.slot)

    def unload_all(self) -> None:
        for name in list(self.active):
            self.unload(name)

    def merge(self, left: str, right: str, target: str) -> Optional[Adapter]:
        slot = self.slots.reserve_slot()  # clean: owned by the new adapter in the table
        la, ra = self.active[left], self.active[right]
        self.slots.a[slot] = (self.slots.a[la.slot] + self.slots.a[ra.slot]) / 2
        self.slots.b[slot] = (self.slots.b[la.slot] + self.slots.b[ra.slot]) / 2
        adapter = Adapter(target, slot, Ownership.OWNED)
        self.replace(target, adapter)
        return adapter

    def alias(self, name: str, like: str) -> Adapter:
        slot = self.slots.reserve_slot()  # leak: marked borrowed, so unload never unreserves it
        src = self.active[like]
        self.slots.a[slot].copy_(self.slots.a[src.slot])
        self.slots.b[slot].copy_(self.slots.b[src.slot])
        adapter = Adapter(name, slot, Ownership.BORROWED)
        self.replace(name, adapter)
        return adapter

    def trial(self, weights: Dict[str, torch.Tensor], x: torch.Tensor) -> Optional[torch.Tensor]:
        try:
            slot = self.slots.reserve_slot()  # clean: near miss, when the reservation itself fails there is nothing to undo
        except SlotError:
            logger.info("no slot for a trial")
            return None
        self.slots.a[slot].copy_(weights["lora_a"])
        self.slots.b[slot].copy_(weights["lora_b"])
        y = x @ self.slots.a[slot].t() @ self.slots.b[slot].t()
        self.slots.unreserve_slot(slot)
        return y

    def pair_trial(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        first = self.slots.reserve_slot()  # leak: when the second reservation raises the handler leaves the first
        try:
            second = self.slots.reserve_slot()  # clean: unreserved with the first
        except SlotError:
            return None
        y = x @ self.slots.a[first].t() @ self.slots.b[second].t()
        self.slots.unreserve_slot(second)
        self.slots.unreserve_slot(first)
        return y

    def pair_trial_safe(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        first = self.slots.reserve_slot()  # clean: near miss, the handler unreserves it
        try:
            second = self.slots.reserve_slot()  # clean: unreserved below
        except SlotError:
            self.slots.unreserve_slot(first)
            return None
        y = x @ self.slots.a[first].t() @ self.slots.b[second].t()
        for s in (first, second):
            self.slots.unreserve_slot(s)
        return y


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, slots: AdapterSlots, owns: bool = True) -> None:
        super().__init__()
        self.base = base
        self.slots = slots
        self.owns = owns
        self.alt: Optional[int] = None
        self.slot = slots.reserve_slot() if owns else 0  # clean: near miss, release() follows the same flag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.slots.a[self.slot].t() @ self.slots.b[self.slot].t()

    def release(self) -> None:
        if self.owns:
            self.slots.unreserve_slot(self.slot)
            self.owns = False

    def set_alternative(self, preferred: int) -> None:
        self.alt = self.slots.reserve_slot(preferred)  # leak: release() knows nothing of the alternative slot
