"""Device cache of embedding rows for host resident tables."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch


class RowSlots:
    def __init__(self, num_slots: int, dim: int, device: torch.device) -> None:
        self.weights = torch.empty(num_slots, dim, device=device)
        self._free = list(range(num_slots - 1, -1, -1))

    def allocate(self) -> Optional[int]:
        if self._free:
            return self._free.pop()
        return None

    def deallocate(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def available(self) -> int:
        return len(self._free)


@dataclass
class RowEntry:
    row: int
    slot: int
    pins: int = 0
    dirty: bool = False


@dataclass
class BatchPins:
    entries: list[RowEntry] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


class EmbeddingCache:
    def __init__(self, host: torch.Tensor, slots: RowSlots) -> None:
        self.host = host
        self.slots = slots
        self._lru: OrderedDict[int, RowEntry] = OrderedDict()
        self._staged: dict[int, int] = {}
        self._pending: dict[int, BatchPins] = {}

    def _evict_one(self) -> bool:
        for row, entry in self._lru.items():
            if entry.pins == 0:
                if entry.dirty:
                    self.host[row].copy_(self.slots.weights[entry.slot])
                del self._lru[row]
                self.slots.deallocate(entry.slot)
                return True
        return False

    def _slot_for(self) -> Optional[int]:
        slot = self.slots.allocate()  # clean: returned to the caller
        if slot is not None:
            return slot
        if not self._evict_one():
            return None
        return self.slots.allocate()  # clean: near miss, only taken when the first allocation gave nothing

    def _fill(self, row: int, slot: int) -> RowEntry:
        self.slots.weights[slot].copy_(self.host[row])
        entry = RowEntry(row, slot)
        self._lru[row] = entry
        return entry

    def pin(self, row: int) -> Optional[RowEntry]:
        entry = self._lru.get(row)
        if entry is None:
            slot = self._slot_for()  # clean: owned by the entry in the lru, evict gives it back
            if slot is None:
                return None
            entry = self._fill(row, slot)
        self._lru.move_to_end(row)
        entry.pins += 1
        return entry

    def unpin(self, entry: RowEntry, dirty: bool = False) -> None:
        entry.pins -= 1
        entry.dirty = entry.dirty or dirty

    def lookup(self, rows: list[int]) -> Optional[torch.Tensor]:
        held: list[RowEntry] = []
        for row in rows:
            entry = self.pin(row)  # leak: when one row cannot be pinned, the rows pinned before stay pinned
            if entry is None:
                return None
            held.append(entry)
        out = self.slots.weights[[e.slot for e in held]]
        for e in held:
            self.unpin(e)
        return out

    def pin_batch(self, step: int, rows: list[int]) -> BatchPins:
        pins = BatchPins()
        for row in rows:
            entry = self.pin(row)  # clean: near miss, kept in the pending batch which finish_batch unpins
            if entry is None:
                pins.missing.append(row)
                continue
            pins.entries.append(entry)
        self._pending[step] = pins
        return pins

    def finish_batch(self, step: int, grads: torch.Tensor, lr: float) -> None:
        pins = self._pending.pop(step, None)
        if pins is None:
            return
        for i, e in enumerate(pins.entries):
            self.slots.weights[e.slot].add_(grads[i], alpha=-lr)
            self.unpin(e, dirty=True)

    def peek(self, row: int) -> Optional[torch.Tensor]:
        entry = self.pin(row)  # leak: the copy is returned and nobody unpins the row
        if entry is None:
            return None
        return self.slots.weights[entry.slot].clone()

    def norm(self, row: int) -> float:
        entry = self.pin(row)  # clean: unpinned before the value is returned
        if entry is None:
            return float(self.host[row].norm())
        value = float(self.slots.weights[entry.slot].norm())
        self.unpin(entry)
        return value

    def stage(self, row: int, value: torch.Tensor) -> bool:
        if row in self._staged:
            self.slots.weights[self._staged[row]].copy_(value)
            return True
        slot = self.slots.allocate()  # clean: near miss, kept in _staged which commit_staged empties
        if slot is None:
            return False
        self.slots.weights[slot].copy_(value)
        self._staged[row] = slot
        return True

    def commit_staged(self) -> int:
        n = 0
        for row, slot in self._staged.items():
            self.host[row].copy_(self.slots.weights[slot])
            self.slots.deallocate(slot)
            n += 1
        self._staged.clear()
        return n

    def prefetch(self, rows: list[int], budget: int) -> int:
        loaded = 0
        for row in rows:
            slot = self._slot_for()  # leak: a row that is cached already continues and drops the slot
            if slot is None or loaded >= budget:
                break
            if row in self._lru:
                continue
            self._fill(row, slot)
            loaded += 1
        return loaded

    def replace(self, row: int, value: torch.Tensor) -> bool:
        old = self._lru.get(row)
        if old is not None and old.pins:
            return False
        slot = self._slot_for()  # leak: the entry made by _fill takes the place of the old entry whose slot is not deallocated
        if slot is None:
            return False
        self.host[row].copy_(value)
        self._fill(row, slot)
        return True

    def refresh(self, row: int) -> bool:
        old = self._lru.pop(row, None)
        if old is not None and old.pins:
            self._lru[row] = old
            return False
        if old is not None:
            self.slots.deallocate(old.slot)
        slot = self._slot_for()  # clean: near miss, the old slot was deallocated before the new entry replaces it
        if slot is None:
            return False
        self._fill(row, slot)
        return True

    def iter_pinned(self, rows: list[int]) -> Iterator[torch.Tensor]:
        for row in rows:
            entry = self.pin(row)  # clean: near miss, unpinned in finally even if the consumer stops early
            if entry is None:
                yield self.host[row]
                continue
            try:
                yield self.slots.weights[entry.slot]
            finally:
                self.unpin(entry)


class CachedEmbeddingBag(torch.nn.Module):
    def __init__(self, cache: EmbeddingCache) -> None:
        super().__init__()
        self.cache = cache
        self._step = 0
        self._tls: Optional[BatchPins] = None

    def forward(self, rows: list[int]) -> torch.Tensor:
        self._step += 1
        pins = self.cache.pin_batch(self._step, rows)  # clean: the pending table keeps it until step finishes the batch
        return self.cache.slots.weights[[e.slot for e in pins.entries]].sum(0)

    def step(self, grads: torch.Tensor, lr: float) -> None:
        self.cache.finish_batch(self._step, grads, lr)

    def evaluate(self, rows: list[int]) -> torch.Tensor:
        self._step += 1
        pins = self.cache.pin_batch(self._step, rows)  # leak: no step follows an evaluation, the batch stays in the pending table
        return self.cache.slots.weights[[e.slot for e in pins.entries]].mean(0)
