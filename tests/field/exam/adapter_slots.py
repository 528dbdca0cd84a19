"""LoRA adapter slots on the device with an LRU of loaded adapters."""
from __future__ import annotations

import abc
import logging
from collections import OrderedDict
from typing import Mapping, Optional

import torch

logger = logging.getLogger(__name__)


class SlotSource(abc.ABC):
    @abc.abstractmethod
    def alloc_slot(self) -> Optional[int]:
        ...

    @abc.abstractmethod
    def dealloc_slot(self, slot: int) -> None:
        ...


class StackSlots(SlotSource):
    def __init__(self, n: int) -> None:
        self._stack = list(range(n))[::-1]

    def alloc_slot(self) -> Optional[int]:
        return self._stack.pop() if self._stack else None  # clean: goes to the caller

    def dealloc_slot(self, slot: int) -> None:
        self._stack.append(slot)


class CountingSlots(StackSlots):
    """Same but refuses odd slots when `even_only` is set."""

    def __init__(self, n: int, even_only: bool = False) -> None:
        super().__init__(n)
        self.even_only = even_only
        self.taken = 0

    def alloc_slot(self) -> Optional[int]:
        slot = super().alloc_slot()  # leak: an odd slot is refused and not pushed back
        if slot is None:
            return None
        if self.even_only and slot % 2:
            return None
        self.taken += 1
        return slot

    def dealloc_slot(self, slot: int) -> None:
        self.taken -= 1
        super().dealloc_slot(slot)


class QuotaSlots(StackSlots):
    def __init__(self, n: int, quota: int) -> None:
        super().__init__(n)
        self.quota = quota
        self.taken = 0

    def alloc_slot(self) -> Optional[int]:
        slot = super().alloc_slot()  # clean: near miss, pushed back when the quota is used up
        if slot is not None and self.taken >= self.quota:
            super().dealloc_slot(slot)
            return None
        self.taken += slot is not None
        return slot

    def dealloc_slot(self, slot: int) -> None:
        self.taken -= 1
        super().dealloc_slot(slot)


class AdapterManager:
    def __init__(self, slots: SlotSource, rank: int, dim: int, n: int) -> None:
        self.slots = slots
        self.a = torch.zeros(n, rank, dim)
        self.b = torch.zeros(n, dim, rank)
        self.active: OrderedDict[str, int] = OrderedDict()
        self.scratch: Optional[int] = None

    def load(self, name: str, weights: Mapping[str, torch.Tensor]) -> bool:
        if name in self.active:
            self.active.move_to_end(name)
            return True
        slot = self.slots.alloc_slot()  # clean: kept in active, unload gives it back
        if slot is None:
            return False
        self.a[slot].copy_(weights["a"])
        self.b[slot].copy_(weights["b"])
        self.active[name] = slot
        return True

    def load_checked(self, name: str, weights: Mapping[str, torch.Tensor]) -> bool:
        slot = self.slots.alloc_slot()  # leak: a rank mismatch returns False with the slot
        if slot is None:
            return False
        if weights["a"].shape[0] != self.a.shape[1]:
            logger.error("%s: rank mismatch", name)
            return False
        self.a[slot].copy_(weights["a"])
        if name in self.active:
            self.slots.dealloc_slot(self.active[name])
        self.active[name] = slot
        return True

    def unload(self, name: str) -> None:
        slot = self.active.pop(name, None)
        if slot is None:
            return
        self.slots.dealloc_slot(slot)

    def load_lru(self, name: str) -> int:
        slot = self.slots.alloc_slot()  # clean: near miss, when None the slot of the victim is reused
        if slot is None:
            victim, slot = self.active.popitem(last=False)
            logger.debug("evict %s", victim)
        if name in self.active:
            self.slots.dealloc_slot(self.active.pop(name))
        self.active[name] = slot
        return slot

    def apply(self, x: torch.Tensor, name: str) -> torch.Tensor:
        slot = self.active.get(name)
        if slot is None:
            return x
        return x + x @ self.a[slot].T @ self.b[slot].T

    def merge(self, names: list[str]) -> Optional[str]:
        slot = self.slots.alloc_slot()  # clean: near miss, stored under the merged name or given back
        if slot is None:
            return None
        known = [n for n in names if n in self.active]
        merged = "+".join(known)
        if not known or merged in self.active:
            self.slots.dealloc_slot(slot)
            return None
        self.a[slot] = torch.stack([self.a[self.active[n]] for n in known]).mean(0)
        self.active[merged] = slot
        return merged

    def merge_tmp(self, names: list[str], x: torch.Tensor) -> torch.Tensor:
        slot = self.slots.alloc_slot()  # leak: the raise for unknown names keeps it
        if slot is None:
            return x
        for n in names:
            if n not in self.active:
                raise KeyError(n)
            self.a[slot] += self.a[self.active[n]]
        out = x @ self.a[slot].T
        self.a[slot].zero_()
        self.slots.dealloc_slot(slot)
        return out

    def ensure_scratch(self) -> Optional[int]:
        if self.scratch is None:
            self.scratch = self.slots.alloc_slot()  # leak: reset() sets the field to None without dealloc
        return self.scratch

    def reset(self) -> None:
        for name in list(self.active):
            self.unload(name)
        self.scratch = None

    def has_room(self) -> bool:
        return self.slots.alloc_slot() is not None  # leak: the test takes a slot
