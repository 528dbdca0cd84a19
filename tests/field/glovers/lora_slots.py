"""GPU slots for LoRA adapters: loading, pinning for the length of a batch, eviction."""
from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

import torch


@dataclass
class AdapterSlot:
    index: int
    adapter: str | None = None
    pins: int = 0
    last_used: float = 0.0


class SlotTable:
    def __init__(self, slots: int):
        self.slots = [AdapterSlot(i) for i in range(slots)]
        self.by_name: dict[str, AdapterSlot] = {}
        self.mutex = threading.Lock()

    def pin(self, name: str) -> AdapterSlot | None:
        """Pin the slot of an adapter; every pin is to be paired with unpin()."""
        with self.mutex:
            slot = self.by_name.get(name) or self._victim()
            if slot is None:
                return None
            if slot.adapter != name:
                if slot.adapter is not None:
                    del self.by_name[slot.adapter]
                slot.adapter = name
                self.by_name[name] = slot
            slot.pins += 1
            slot.last_used = time.monotonic()
            return slot

    def unpin(self, slot: AdapterSlot) -> None:
        with self.mutex:
            slot.pins -= 1

    def _victim(self) -> AdapterSlot | None:
        idle = [s for s in self.slots if s.pins == 0]
        return min(idle, key=lambda s: s.last_used) if idle else None


class StagingBuffers:
    """Pinned host buffers through which adapter weights travel."""

    def __init__(self, count: int, numel: int):
        self._idle = [torch.empty(numel, pin_memory=True) for _ in range(count)]

    def borrow(self) -> torch.Tensor | None:
        return self._idle.pop() if self._idle else None

    def give_back(self, buf: torch.Tensor) -> None:
        self._idle.append(buf)


class PinnedAdapter:
    """with PinnedAdapter(table, name) as slot: ..."""

    def __init__(self, table: SlotTable, name: str):
        self.table = table
        self.name = name
        self.slot: AdapterSlot | None = None

    def __enter__(self) -> AdapterSlot | None:
        self.slot = self.table.pin(self.name)  # clean: __exit__ unpins whatever was pinned
        return self.slot

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.slot is not None:
            self.table.unpin(self.slot)
            self.slot = None


class LoraManager:
    def __init__(self, table: SlotTable, staging: StagingBuffers, weights: torch.Tensor):
        self.table = table
        self.staging = staging
        self.weights = weights
        self.resident: set[str] = set()
        self.batch_pins: dict[int, list[AdapterSlot]] = {}

    def load(self, name: str, path: str) -> bool:
        slot = self.table.pin(name)  # leak: when no staging buffer is there, False is returned with the slot pinned
        if slot is None:
            return False
        if name not in self.resident:
            buf = self.staging.borrow()  # clean: given back after the copy, None otherwise
            if buf is None:
                return False
            buf.copy_(torch.load(path))
            self.weights[slot.index].copy_(buf)
            self.staging.give_back(buf)
            self.resident.add(name)
        self.table.unpin(slot)
        return True

    def prefetch(self, names: dict[str, str]) -> int:
        loaded = 0
        for name, path in names.items():
            buf = self.staging.borrow()  # leak: continue for an already resident adapter skips give_back
            if buf is None:
                break
            if name in self.resident:
                continue
            with PinnedAdapter(self.table, name) as slot:  # clean: the manager unpins at the end of the block
                if slot is not None:
                    buf.copy_(torch.load(path))
                    self.weights[slot.index].copy_(buf)
                    self.resident.add(name)
                    loaded += 1
            self.staging.give_back(buf)
        return loaded

    def begin_batch(self, step: int, adapters: list[str | None]) -> list[int]:
        pins: list[AdapterSlot] = []
        indices = []
        for name in adapters:
            if name is None:
                indices.append(-1)
                continue
            slot = self.table.pin(name)  # clean: near miss, -1 only for None; else kept in batch_pins until end_batch
            if slot is None:
                indices.append(-1)
                continue
            pins.append(slot)
            indices.append(slot.index)
        self.batch_pins[step] = pins
        return indices

    def end_batch(self, step: int) -> None:
        for slot in self.batch_pins.pop(step, ()):
            self.table.unpin(slot)

    def merge(self, target: str, sources: list[str]) -> bool:
        """Linear merge of several adapters into one resident slot."""
        out = self.table.pin(target)  # clean: unpinned in the finally
        if out is None:
            return False
        try:
            acc = torch.zeros_like(self.weights[out.index])
            for name in sources:
                src = self.table.pin(name)  # leak: a source that is not resident returns False with src pinned
                if src is None:
                    return False
                if name not in self.resident:
                    return False
                acc += self.weights[src.index]
                self.table.unpin(src)
            self.weights[out.index].copy_(acc / max(len(sources), 1))
            self.resident.add(target)
            return True
        finally:
            self.table.unpin(out)

    def heavier(self, old: str, new: str) -> int:
        """Say whether the second adapter is heavier than the first."""
        slot = self.table.pin(old)  # leak: rebound to the slot of the other adapter before unpin
        if slot is None:
            return -1
        left = self.weights[slot.index].norm().item()
        slot = self.table.pin(new)  # clean: unpinned below unless None
        if slot is None:
            return -1
        right = self.weights[slot.index].norm().item()
        self.table.unpin(slot)
        return int(left < right)

    @contextlib.contextmanager
    def pinned(self, names: list[str]):
        with contextlib.ExitStack() as stack:
            slots = []
            for name in names:
                slot = self.table.pin(name)  # clean: unpin is a callback of the stack
                if slot is None:
                    break
                stack.callback(self.table.unpin, slot)
                slots.append(slot)
            yield slots

    def norms(self, names: list[str]) -> list[float]:
        with self.pinned(names) as slots:  # clean: the stack inside the manager unpins
            if len(slots) < len(names):
                return []
            return [self.weights[s.index].norm().item() for s in slots]


def stage_scaled(manager: LoraManager, name: str, scale: float) -> torch.Tensor | None:
    """Give the scaled weights of a resident adapter to the caller in a staging buffer."""
    buf = manager.staging.borrow()  # clean: handed to the caller
    if buf is None:
        return None
    with PinnedAdapter(manager.table, name) as slot:  # clean: unpinned at the end of the block
        if slot is None:
            manager.staging.give_back(buf)
            return None
        buf.copy_(manager.weights[slot.index])
    buf.mul_(scale)
    return buf


def checksum(manager: LoraManager, name: str) -> float:
    staged = stage_scaled(manager, name, 1.0)  # leak: only a sum is taken, the buffer never goes back
    if staged is None:
        return 0.0
    return float(staged.double().sum())


def save_scaled(manager: LoraManager, name: str, scale: float, path: str) -> bool:
    staged = stage_scaled(manager, name, scale)  # clean: given back in the finally
    if staged is None:
        return False
    try:
        torch.save(staged.clone(), path)
    finally:
        manager.staging.give_back(staged)
    return True
