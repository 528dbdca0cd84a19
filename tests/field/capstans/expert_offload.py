"""MoE expert offload: a few device slots per layer, filled ahead of the router's choice."""
from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class ExpertSource(Protocol):
    def read(self, layer: int, expert: int) -> torch.Tensor | None: ...


class SlotPool:
    def __init__(self, n: int, numel: int, device: str = "cuda") -> None:
        self.weights = torch.empty(n, numel, dtype=torch.bfloat16, device=device)
        self._vacant = set(range(n))
        self._lock = threading.Lock()

    def occupy(self) -> int | None:
        with self._lock:
            return self._vacant.pop() if self._vacant else None  # clean: handed to the caller

    def vacate(self, slot: int) -> None:
        with self._lock:
            self._vacant.add(slot)


class QuotaSlots:
    """A layer's share of the slots; wraps the pool of the whole model."""

    def __init__(self, pool: SlotPool, quota: int) -> None:
        self.pool = pool
        self.quota = quota
        self.used = 0

    def occupy(self) -> int | None:
        if self.used >= self.quota:
            return None
        slot = self.pool.occupy()  # clean: handed to the caller and counted
        if slot is not None:
            self.used += 1
        return slot

    def occupy_strict(self) -> int | None:
        slot = self.pool.occupy()  # leak: over the quota the pool's slot is dropped
        if slot is None:
            return None
        if self.used >= self.quota:
            return None
        self.used += 1
        return slot

    def vacate(self, slot: int) -> None:
        self.used -= 1
        self.pool.vacate(slot)


class Entry:
    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.refs = 0


class ExpertCache:
    def __init__(self, layer: int, slots: QuotaSlots, source: ExpertSource, pool: ThreadPoolExecutor) -> None:
        self.layer = layer
        self.slots = slots
        self.source = source
        self.exec = pool
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.tasks: dict[int, tuple[int, Future]] = {}

    def addref(self, expert: int) -> Entry | None:
        e = self.entries.get(expert)
        if e is not None:
            e.refs += 1
            self.entries.move_to_end(expert)
        return e

    def decref(self, e: Entry) -> None:
        e.refs -= 1

    def _make_room(self) -> bool:
        for expert, e in self.entries.items():
            if e.refs == 0:
                del self.entries[expert]
                self.slots.vacate(e.slot)
                return True
        return False

    def fill(self, expert: int) -> bool:
        if expert in self.entries:
            return True
        slot = self.slots.occupy()  # leak: a source without the expert returns False with the slot occupied
        if slot is None:
            return False
        data = self.source.read(self.layer, expert)
        if data is None:
            return False
        self.slots.pool.weights[slot].copy_(data)
        self.entries[expert] = Entry(slot)
        return True

    def fill_or_evict(self, expert: int) -> bool:
        if expert in self.entries:
            return True
        slot = self.slots.occupy()  # clean: near miss, occupied again only when it is None
        if slot is None and self._make_room():
            slot = self.slots.occupy()  # clean: vacated without data, else kept in the entry
        if slot is None:
            return False
        data = self.source.read(self.layer, expert)
        if data is None:
            self.slots.vacate(slot)
            return False
        self.slots.pool.weights[slot].copy_(data)
        self.entries[expert] = Entry(slot)
        return True

    # ahead of time

    def prefetch(self, expert: int) -> bool:
        if expert in self.entries or expert in self.tasks:
            return False
        slot = self.slots.occupy()  # clean: near miss, moved into self.tasks, which settle() and cancel() take it out of
        if slot is None:
            return False
        self.tasks[expert] = (slot, self.exec.submit(self._load, slot, expert))
        return True

    def _load(self, slot: int, expert: int) -> bool:
        data = self.source.read(self.layer, expert)
        if data is not None:
            self.slots.pool.weights[slot].copy_(data)
        return data is not None

    def settle(self, expert: int) -> bool:
        slot, fut = self.tasks.pop(expert)
        if fut.exception() is None and fut.result() and expert not in self.entries:
            self.entries[expert] = Entry(slot)
            return True
        self.slots.vacate(slot)
        return False

    def cancel(self) -> None:
        for expert in list(self.tasks):
            self.settle(expert)

    def prefetch_pair(self, a: int, b: int) -> bool:
        sa = self.slots.occupy()  # leak: without a second slot the first is not vacated
        if sa is None:
            return False
        sb = self.slots.occupy()  # clean: moved into self.tasks
        if sb is None:
            return False
        for slot, expert in ((sa, a), (sb, b)):
            if expert in self.tasks:
                self.settle(expert)
            self.tasks[expert] = (slot, self.exec.submit(self._load, slot, expert))
        return True

    # use by the forward pass

    def weights(self, expert: int) -> torch.Tensor | None:
        e = self.addref(expert)  # clean: dropped after the copy, or None
        if e is None:
            return None
        w = self.slots.pool.weights[e.slot].clone()
        self.decref(e)
        return w

    def forward(self, x: torch.Tensor, experts: list[int]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for ex in experts:
            e = self.addref(ex)  # leak: the continue for rows that do not fit skips decref
            if e is None:
                continue
            w = self.slots.pool.weights[e.slot]
            if w.numel() % x.shape[-1]:
                continue
            out += x @ w.view(x.shape[-1], -1)[:, :x.shape[-1]]
            self.decref(e)
        return out
