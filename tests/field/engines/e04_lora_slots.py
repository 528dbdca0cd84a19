"""GPU slots for LoRA adapters, shared by the requests of a batch."""
from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Callable

import torch

logger = logging.getLogger(__name__)


@dataclass
class AdapterWeights:
    name: str
    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class SlotTable:
    """A free list of slot indices plus the device tensors behind them."""

    def __init__(self, num_slots: int, max_rank: int, hidden: int, device: str = "cpu") -> None:
        self.max_rank = max_rank
        self._free = list(range(num_slots))
        self._busy: set[int] = set()
        self.a_stack = torch.zeros(num_slots, max_rank, hidden, device=device)
        self.b_stack = torch.zeros(num_slots, hidden, max_rank, device=device)

    def acquire_slot(self) -> int:
        """Return a slot index, or -1 when all are busy."""
        if not self._free:
            return -1
        slot = self._free.pop()  # clean: marked busy and returned
        self._busy.add(slot)
        return slot

    def release_slot(self, slot: int) -> None:
        self._busy.remove(slot)
        self.a_stack[slot].zero_()
        self.b_stack[slot].zero_()
        self._free.append(slot)


class LoRAManager:
    """Loads adapters on demand and evicts the least recently used idle one."""

    def __init__(self, table: SlotTable, loader: Callable[[str], AdapterWeights | None]) -> None:
        self.table = table
        self.loader = loader
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._users: defaultdict[str, int] = defaultdict(int)
        self._pinned: dict[str, int] = {}

    def _evict_idle(self) -> bool:
        for name in self._resident:
            if self._users[name] == 0:
                self.table.release_slot(self._resident.pop(name))
                return True
        return False

    def _take_slot(self) -> int:
        slot = self.table.acquire_slot()  # clean: near miss, -1 is not a slot and leads to a second try
        if slot < 0 and self._evict_idle():
            slot = self.table.acquire_slot()  # clean: handed to the caller
        return slot

    def _copy(self, slot: int, w: AdapterWeights) -> None:
        self.table.a_stack[slot, : w.rank].copy_(w.a)
        self.table.b_stack[slot, :, : w.rank].copy_(w.b)

    def activate(self, name: str) -> int:
        """Make ``name`` resident and return its slot, -1 if it cannot be."""
        if name in self._resident:
            self._resident.move_to_end(name)
            return self._resident[name]
        slot = self._take_slot()  # leak: an adapter that is missing or too large returns without giving the slot back
        if slot < 0:
            return -1
        weights = self.loader(name)
        if weights is None or weights.rank > self.table.max_rank:
            logger.error("adapter %s cannot be loaded", name)
            return -1
        self._copy(slot, weights)
        self._resident[name] = slot
        return slot

    def pin(self, name: str, weights: AdapterWeights) -> bool:
        """Keep an adapter on the device until ``unpin_all``."""
        if name in self._pinned:
            return True
        slot = self._take_slot()  # clean: kept in the pinned table, unpin_all empties it
        if slot == -1:
            return False
        self._copy(slot, weights)
        self._pinned[name] = slot
        return True

    def unpin_all(self) -> None:
        while self._pinned:
            _, slot = self._pinned.popitem()
            self.table.release_slot(slot)

    def replace(self, name: str, weights: AdapterWeights) -> bool:
        """Swap in a new version of an adapter; old requests keep none of it."""
        slot = self._take_slot()  # clean: near miss, the displaced slot is popped and released before the store
        if slot < 0:
            return False
        self._copy(slot, weights)
        old = self._resident.pop(name, None)
        if old is not None:
            self.table.release_slot(old)
        self._resident[name] = slot
        return True

    def reload_pinned(self, name: str, weights: AdapterWeights) -> bool:
        slot = self._take_slot()  # leak: overwrites the slot that the pinned table still holds for the name
        if slot < 0:
            return False
        self._copy(slot, weights)
        self._pinned[name] = slot
        logger.info("reloaded pinned adapter %s", name)
        return True

    def prefetch(self, names: list[str]) -> int:
        loaded = 0
        for name in names:
            if name in self._resident:
                continue
            slot = self.table.acquire_slot()  # leak: the handler for a broken adapter continues without releasing
            if slot < 0:
                break
            try:
                self._copy(slot, self.loader(name))
            except (AttributeError, RuntimeError):
                logger.warning("adapter %s skipped", name)
                continue
            self._resident[name] = slot
            loaded += 1
        return loaded

    def benchmark(self, weights: AdapterWeights, x: torch.Tensor, iters: int) -> torch.Tensor | None:
        slot = self._take_slot()  # clean: released on both ways out
        if slot < 0:
            return None
        self._copy(slot, weights)
        y = x
        for _ in range(iters):
            y = y + (x @ self.table.a_stack[slot].T) @ self.table.b_stack[slot].T
            if not torch.isfinite(y).all():
                self.table.release_slot(slot)
                return None
        self.table.release_slot(slot)
        return y

    def shutdown(self) -> None:
        self.unpin_all()
        for slot in self._resident.values():
            self.table.release_slot(slot)
        self._resident.clear()
