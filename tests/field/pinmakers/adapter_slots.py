"""LoRA adapters for attention projections, resident in a fixed set of GPU slots.

A slot is pinned while a batch uses it and may be evicted when nobody does.
"""
import dataclasses
import logging
from collections import OrderedDict
from typing import Callable, Dict, Iterable, List, Optional, Set

import torch

log = logging.getLogger(__name__)


class AdapterLoadError(Exception):
    pass


@dataclasses.dataclass
class Slot:
    index: int
    a: torch.Tensor
    b: torch.Tensor
    adapter: Optional[str] = None
    users: int = 0


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    adapters: List[Optional[str]]
    pinned: Dict[str, Slot] = dataclasses.field(default_factory=dict)
    failed: bool = False


class SlotTable:
    def __init__(self, n: int, dim: int, rank: int):
        self.slots = [Slot(i, torch.zeros(dim, rank), torch.zeros(rank, dim)) for i in range(n)]
        self.vacant: Set[int] = set(range(n))
        self.resident: "OrderedDict[str, Slot]" = OrderedDict()

    # a vacant slot is taken out by seat() and put back by vacate()

    def seat(self) -> Optional[Slot]:
        if self.vacant:
            return self.slots[self.vacant.pop()]
        for name, slot in self.resident.items():
            if slot.users == 0:
                del self.resident[name]
                slot.adapter = None
                return slot
        return None

    def seat_of_rank(self, rank: int) -> Optional[Slot]:
        while self.vacant:
            slot = self.slots[self.vacant.pop()]  # leak: a vacant slot of another rank is taken out and not put back
            if slot.a.shape[1] == rank:
                return slot
        return None

    def vacate(self, slot: Slot) -> None:
        slot.adapter = None
        self.vacant.add(slot.index)

    # users of a resident slot

    def pin(self, name: str) -> Optional[Slot]:
        slot = self.resident.get(name)
        if slot is None:
            return None
        slot.users += 1
        self.resident.move_to_end(name)
        return slot

    def unpin(self, slot: Slot) -> None:
        slot.users -= 1


class AdapterManager:
    def __init__(self, table: SlotTable, reader: Callable[[str], Optional[Dict[str, torch.Tensor]]]):
        self.table = table
        self.reader = reader
        self.blocked: Set[str] = set()

    def load(self, name: str) -> bool:
        if name in self.table.resident:
            return True
        slot = self.table.seat()  # clean: vacated when the weights are missing, else resident
        if slot is None:
            return False
        weights = self.reader(name)
        if weights is None:
            self.table.vacate(slot)
            return False
        slot.a.copy_(weights["a"])
        slot.b.copy_(weights["b"])
        slot.adapter = name
        self.table.resident[name] = slot
        return True

    def load_checked(self, name: str) -> bool:
        if name in self.table.resident:
            return True
        slot = self.table.seat()  # leak: not vacated when the rank does not match
        if slot is None:
            return False
        weights = self.reader(name)
        if weights is None:
            self.table.vacate(slot)
            return False
        if weights["a"].shape != slot.a.shape:
            raise AdapterLoadError(f"{name}: rank {weights['a'].shape[1]} does not fit")
        slot.a.copy_(weights["a"])
        slot.b.copy_(weights["b"])
        slot.adapter = name
        self.table.resident[name] = slot
        return True

    def reload(self, name: str) -> bool:
        current = self.table.resident.get(name)
        if current is not None and current.users:
            return False
        weights = self.reader(name)
        if weights is None:
            return False
        fresh = self.table.seat()  # clean: near miss, the slot it replaces is vacated
        if fresh is None:
            return False
        fresh.a.copy_(weights["a"])
        fresh.b.copy_(weights["b"])
        fresh.adapter = name
        stale = self.table.resident.pop(name, None)
        self.table.resident[name] = fresh
        if stale is not None:
            self.table.vacate(stale)
        return True

    def unload(self, name: str) -> bool:
        slot = self.table.resident.get(name)
        if slot is None or slot.users:
            return False
        del self.table.resident[name]
        self.table.vacate(slot)
        return True

    def evict_idle(self, names: Iterable[str]) -> int:
        """Take idle adapters out of residence; their slots become vacant."""
        n = 0
        for name in names:
            if name in self.blocked:
                log.info("%s is blocked", name)
                continue
            n += self.unload(name)
        return n

    def load_many(self, names: List[str]) -> bool:
        seats: List[Slot] = []
        for name in names:
            slot = self.table.seat()  # clean: near miss, all the seats are vacated when one is missing
            if slot is None:
                for s in seats:
                    self.table.vacate(s)
                return False
            seats.append(slot)
        for name, slot in zip(names, seats):
            weights = self.reader(name) if name not in self.table.resident else None
            if weights is None:
                self.table.vacate(slot)
                continue
            slot.a.copy_(weights["a"])
            slot.b.copy_(weights["b"])
            slot.adapter = name
            self.table.resident[name] = slot
        return True

    # -- batches --------------------------------------------------------------

    def attach(self, batch: Batch) -> bool:
        for name in batch.adapters:
            if name is None or name in batch.pinned:
                continue
            slot = self.table.pin(name)  # clean: kept in batch.pinned, which detach() unpins
            if slot is None:
                self.detach(batch)
                return False
            batch.pinned[name] = slot
        return True

    def attach_rows(self, batch: Batch) -> bool:
        for name in batch.adapters:
            if name is None:
                continue
            slot = self.table.pin(name)  # leak: a name of several rows is pinned once per row and kept once
            if slot is None:
                self.detach(batch)
                return False
            batch.pinned[name] = slot
        return True

    def detach(self, batch: Batch) -> None:
        for slot in batch.pinned.values():
            self.table.unpin(slot)
        batch.pinned.clear()

    def run(self, batch: Batch) -> torch.Tensor:
        out = torch.zeros_like(batch.rows)
        if not self.attach(batch):  # clean: detached in finally, and attach unpins when it fails
            batch.failed = True
            return out
        try:
            for i, name in enumerate(batch.adapters):
                if name is None:
                    continue
                slot = batch.pinned[name]
                out[i] = batch.rows[i] @ slot.a @ slot.b
        finally:
            self.detach(batch)
        return out

    def run_one(self, name: str, x: torch.Tensor) -> torch.Tensor:
        slot = self.table.pin(name)  # leak: the shortcut for zero input returns without unpin
        if slot is None:
            raise KeyError(name)
        if not x.any():
            return torch.zeros_like(x)
        y = x @ slot.a @ slot.b
        self.table.unpin(slot)
        return y

    def similarity(self, left: str, right: str) -> float:
        a = self.table.pin(left)  # leak: not unpinned when right is not resident
        b = self.table.pin(right)  # clean: unpinned at the end or on the early return
        if a is None or b is None:
            if b is not None:
                self.table.unpin(b)
            return 0.0
        value = float((a.a * b.a).sum())
        self.table.unpin(a)
        self.table.unpin(b)
        return value


class PinGuard:
    """with PinGuard(table, name) as slot: ...   (slot is None when it is not resident)"""

    def __init__(self, table: SlotTable, name: str):
        self.table = table
        self.name = name
        self.slot: Optional[Slot] = None

    def __enter__(self) -> Optional[Slot]:
        self.slot = self.table.pin(self.name)  # clean: near miss, __exit__ returns early only when it is None
        return self.slot

    def __exit__(self, *exc) -> bool:
        if self.slot is None:
            return False
        self.table.unpin(self.slot)
        self.slot = None
        return False
