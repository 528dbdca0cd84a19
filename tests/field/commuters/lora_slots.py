"""Adapter slots: a fixed number of LoRA adapters may be resident on the GPU at once."""
from __future__ import annotations

import heapq
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch

log = logging.getLogger("lora")


@dataclass(order=True)
class AdapterSlot:
    index: int
    adapter: str = field(default="", compare=False)
    a: Optional[torch.Tensor] = field(default=None, compare=False)
    b: Optional[torch.Tensor] = field(default=None, compare=False)


class SlotsExhausted(RuntimeError):
    pass


class AdapterSlots:
    """Lowest index first, so the grouped GEMM stays compact."""

    def __init__(self, count: int) -> None:
        self._vacant = [AdapterSlot(i) for i in range(count)]
        heapq.heapify(self._vacant)

    def occupy(self, adapter: str) -> AdapterSlot:
        if not self._vacant:
            raise SlotsExhausted(adapter)
        slot = heapq.heappop(self._vacant)  # clean: returned to the caller
        slot.adapter = adapter
        return slot

    def occupy_at(self, index: int, adapter: str) -> Optional[AdapterSlot]:
        skipped: list[AdapterSlot] = []
        found: Optional[AdapterSlot] = None
        while self._vacant:
            slot = heapq.heappop(self._vacant)  # clean: near miss, the skipped ones are pushed back below
            if slot.index == index:
                found = slot
                break
            skipped.append(slot)
        for slot in skipped:
            heapq.heappush(self._vacant, slot)
        if found is not None:
            found.adapter = adapter
        return found

    def vacate(self, slot: AdapterSlot) -> None:
        slot.adapter = ""
        slot.a = slot.b = None
        heapq.heappush(self._vacant, slot)

    @contextmanager
    def resident(self, adapter: str) -> Iterator[AdapterSlot]:
        slot = self.occupy(adapter)  # clean: vacated in the finally of the context manager
        try:
            yield slot
        finally:
            self.vacate(slot)


class AdapterRegistry:
    def __init__(self, slots: AdapterSlots, max_rank: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.active: dict[str, AdapterSlot] = {}

    def load(self, name: str, a: torch.Tensor, b: torch.Tensor) -> AdapterSlot:
        if name in self.active:
            return self.active[name]
        slot = self.slots.occupy(name)  # leak: the rank check raises while the slot is occupied
        if a.shape[0] > self.max_rank:
            raise ValueError(f"rank {a.shape[0]} of {name} too large")
        slot.a, slot.b = a, b
        self.active[name] = slot
        return slot

    def reload(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        fresh = self.slots.occupy(name)  # clean: near miss, the replaced slot is vacated after the swap
        fresh.a, fresh.b = a, b
        old = self.active.get(name)
        self.active[name] = fresh
        if old is not None:
            self.slots.vacate(old)

    def preload(self, names: list[str], weights: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> int:
        loaded = 0
        for name in names:
            if name in self.active:
                continue
            try:
                slot = self.slots.occupy(name)  # leak: a missing weight is caught and skipped, slot and all
                slot.a, slot.b = weights[name]
                self.active[name] = slot
                loaded += 1
            except KeyError:
                log.warning("no weights for %s", name)
            except SlotsExhausted:
                break
        return loaded

    def unload(self, name: str) -> bool:
        slot = self.active.pop(name, None)
        if slot is None:
            return False
        self.slots.vacate(slot)
        return True

    def evict_lru(self, order: list[str]) -> Optional[AdapterSlot]:
        for name in order:
            if self.unload(name):
                return self.slots.occupy("reserved")  # clean: handed to the caller
        return None

    def merge(self, target: str, sources: list[str]) -> Optional[AdapterSlot]:
        if target in self.active:
            return self.active[target]
        slot = self.slots.occupy(target)  # clean: near miss, vacated when no source is active, else registered
        total = None
        for name in sources:
            src = self.active.get(name)
            if src is None or src.a is None:
                continue
            total = src.a if total is None else total + src.a
        if total is None:
            self.slots.vacate(slot)
            return None
        slot.a = total
        self.active[target] = slot
        return slot


def evaluate(slots: AdapterSlots, name: str, x: torch.Tensor) -> torch.Tensor:
    with slots.resident(name) as slot:  # clean: context manager vacates it
        if slot.a is None:
            return x
        return x @ slot.a.T


def swap_in(registry: AdapterRegistry, name: str, order: list[str]) -> bool:
    spare = registry.evict_lru(order)  # leak: an already active adapter returns without the spare going anywhere
    if spare is None:
        return False
    if name in registry.active:
        return True
    spare.adapter = name
    registry.active[name] = spare
    return True


def pin_system_adapter(registry: AdapterRegistry, index: int) -> bool:
    if "system" in registry.active:
        return True
    slot = registry.slots.occupy_at(index, "system")  # clean: registered under its name, unload vacates
    if slot is None:
        return False
    registry.active["system"] = slot
    return True


def dry_run(slots: AdapterSlots, names: list[str]) -> int:
    trial: list[AdapterSlot] = []
    for name in names:
        try:
            trial.append(slots.occupy(name))  # leak: a set that does not fit wholly returns -1 with the trial slots taken
        except SlotsExhausted:
            break
    fitted = len(trial)
    if fitted < len(names):
        return -1
    while trial:
        slots.vacate(trial.pop())
    return fitted
