"""LoRA adapter slots on the GPU with an LRU of unpinned adapters."""
from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Dict, List, NamedTuple, Optional, Set

import torch

_log = logging.getLogger(__name__)


class LoRAWeights(NamedTuple):
    name: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class SlotTable:
    def __init__(self, capacity: int) -> None:
        self._vacant: Set[int] = set(range(capacity))

    def take(self) -> Optional[int]:
        if not self._vacant:
            return None
        return self._vacant.pop()  # clean: handed to the caller

    def return_(self, slot: int) -> None:
        self._vacant.add(slot)

    def take_below(self, bound: int) -> Optional[int]:
        if not self._vacant:
            return None
        slot = self._vacant.pop()  # leak: a slot at or above the bound is dropped
        if slot >= bound:
            return None
        return slot

    def take_above(self, bound: int) -> Optional[int]:
        if not self._vacant:
            return None
        slot = self._vacant.pop()  # clean: near miss, an unsuitable slot is added again
        if slot < bound:
            self._vacant.add(slot)
            return None
        return slot


class AdapterCache:
    def __init__(self, table: SlotTable, a_bank: torch.Tensor, b_bank: torch.Tensor, max_rank: int) -> None:
        self.table = table
        self.a_bank = a_bank
        self.b_bank = b_bank
        self.max_rank = max_rank
        self.active: "OrderedDict[str, int]" = OrderedDict()
        self.draft: Dict[str, int] = {}

    def _copy_in(self, slot: int, w: LoRAWeights) -> None:
        r = w.a.shape[0]
        self.a_bank[slot].zero_()
        self.b_bank[slot].zero_()
        self.a_bank[slot, :r].copy_(w.a)
        self.b_bank[slot, :, :r].copy_(w.b * w.scaling)

    def _evict_one(self) -> bool:
        if not self.active:
            return False
        name, slot = self.active.popitem(last=False)
        _log.debug("evict %s from slot %d", name, slot)
        self.table.return_(slot)
        return True

    def load(self, w: LoRAWeights) -> int:
        if w.name in self.active:
            self.active.move_to_end(w.name)
            return self.active[w.name]
        slot = self.table.take()  # clean: near miss, the loop only runs while nothing is held; then kept in active
        while slot is None:
            if not self._evict_one():
                raise RuntimeError("no adapter slot available")
            slot = self.table.take()  # clean: kept in active, unload and evict return it
        self._copy_in(slot, w)
        self.active[w.name] = slot
        return slot

    def reload(self, w: LoRAWeights) -> Optional[int]:
        """New weights under a known name get a fresh slot (old one may be in flight)."""
        slot = self.table.take()  # leak: a rank that is too high returns None with the slot taken
        if slot is None:
            return None
        if w.a.shape[0] > self.max_rank:
            _log.error("rank %d of %s exceeds %d", w.a.shape[0], w.name, self.max_rank)
            return None
        previous = self.active.pop(w.name, None)
        if previous is not None:
            self.table.return_(previous)
        self._copy_in(slot, w)
        self.active[w.name] = slot
        return slot

    def load_draft(self, w: LoRAWeights) -> bool:
        slot = self.table.take_below(self.a_bank.shape[0])  # leak: loading a draft twice overwrites the entry with its slot
        if slot is None:
            return False
        self._copy_in(slot, w)
        self.draft[w.name] = slot
        return True

    def drop_draft(self, name: str) -> None:
        slot = self.draft.pop(name, None)
        if slot is not None:
            self.table.return_(slot)

    def unload(self, name: str) -> bool:
        slot = self.active.pop(name, None)
        if slot is None:
            return False
        self.table.return_(slot)
        return True

    def benchmark(self, w: LoRAWeights, x: torch.Tensor, reps: int = 10) -> Optional[torch.Tensor]:
        slot = self.table.take_above(0)  # clean: returned in finally
        if slot is None:
            return None
        try:
            self._copy_in(slot, w)
            y = x
            for _ in range(reps):
                y = x @ self.a_bank[slot].T @ self.b_bank[slot].T
            return y
        finally:
            self.table.return_(slot)

    def load_many(self, items: List[LoRAWeights]) -> Dict[str, int]:
        got: Dict[str, int] = {}
        for w in items:
            slot = self.table.take()  # leak: when the table runs out got is dropped with the slots taken so far
            if slot is None:
                return {}
            self._copy_in(slot, w)
            got[w.name] = slot
        self.active.update(got)
        return got

    def stage(self, items: List[LoRAWeights]) -> bool:
        staged: List[int] = []
        for _ in items:
            slot = self.table.take()  # clean: near miss, the partial list is returned before False
            if slot is None:
                for s in staged:
                    self.table.return_(s)
                return False
            staged.append(slot)
        for w, s in zip(items, staged):
            self._copy_in(s, w)
            old = self.active.pop(w.name, None)
            if old is not None:
                self.table.return_(old)
            self.active[w.name] = s
        return True
