"""GPU slots for LoRA adapters: claiming, eviction, and the executors that use them."""
from __future__ import annotations

import abc
from collections import OrderedDict
from typing import Dict, List, Optional


class SlotsExhausted(RuntimeError):
    pass


class SlotTable:
    """``claim`` hands out a slot index that must be vacated."""

    def __init__(self, n: int) -> None:
        self._idle: List[int] = list(range(n))
        self._owner: Dict[int, str] = {}

    def claim(self, adapter: str) -> int:
        if not self._idle:
            raise SlotsExhausted(adapter)
        slot = self._idle.pop()
        self._owner[slot] = adapter
        return slot

    def vacate(self, slot: int) -> None:
        del self._owner[slot]
        self._idle.append(slot)

    @property
    def idle(self) -> int:
        return len(self._idle)


class WeightStore:
    def __init__(self, ranks: Dict[str, int]) -> None:
        self.ranks = ranks

    def copy_to_slot(self, adapter: str, slot: int) -> int:
        if adapter not in self.ranks:
            raise KeyError(adapter)
        return self.ranks[adapter]


class AdapterManager(abc.ABC):
    max_rank = 64

    def __init__(self, table: SlotTable, store: WeightStore) -> None:
        self.table = table
        self.store = store

    @abc.abstractmethod
    def activate(self, adapter: str) -> Optional[int]:
        ...

    @abc.abstractmethod
    def deactivate(self, adapter: str) -> None:
        ...


class SimpleManager(AdapterManager):
    def __init__(self, table: SlotTable, store: WeightStore) -> None:
        super().__init__(table, store)
        self.active: Dict[str, int] = {}

    def activate(self, adapter: str) -> Optional[int]:
        if adapter in self.active:
            return self.active[adapter]
        slot = self.table.claim(adapter)  # leak: unknown adapter is caught and answered with None, the slot stays claimed
        try:
            self.store.copy_to_slot(adapter, slot)
        except KeyError:
            return None
        self.active[adapter] = slot
        return slot

    def deactivate(self, adapter: str) -> None:
        slot = self.active.pop(adapter, None)
        if slot is not None:
            self.table.vacate(slot)


class LRUManager(AdapterManager):
    """Evicts the coldest adapter when no slot is idle."""

    def __init__(self, table: SlotTable, store: WeightStore) -> None:
        super().__init__(table, store)
        self.lru: "OrderedDict[str, int]" = OrderedDict()
        self.preload_slot: Optional[int] = None

    def activate(self, adapter: str) -> Optional[int]:
        if adapter in self.lru:
            self.lru.move_to_end(adapter)
            return self.lru[adapter]
        if self.table.idle == 0 and self.lru:
            _, cold = self.lru.popitem(last=False)
            self.table.vacate(cold)
        slot = self.table.claim(adapter)  # clean: stored in the lru, the failed load vacates it
        try:
            rank = self.store.copy_to_slot(adapter, slot)
        except KeyError:
            self.table.vacate(slot)
            return None
        if rank > self.max_rank:
            self.table.vacate(slot)
            return None
        self.lru[adapter] = slot
        return slot

    def deactivate(self, adapter: str) -> None:
        slot = self.lru.pop(adapter, None)
        if slot is not None:
            self.table.vacate(slot)

    def preload(self, adapter: str) -> None:
        self.preload_slot = self.table.claim(adapter)  # leak: a second preload overwrites the slot of the first
        self.store.copy_to_slot(adapter, self.preload_slot)

    def commit_preload(self, adapter: str) -> None:
        if self.preload_slot is None:
            return
        self.deactivate(adapter)
        self.lru[adapter] = self.preload_slot
        self.preload_slot = None

    def swap(self, old: str, new: str) -> Optional[int]:
        """Loads ``new`` next to ``old`` and then drops ``old``."""
        if new in self.lru:
            return self.lru[new]
        slot = self.table.claim(new)  # leak: oversized rank returns None with the slot held
        rank = self.store.copy_to_slot(new, slot)
        if rank > self.max_rank:
            return None
        previous = self.lru.pop(old, None)
        if previous is not None:
            self.table.vacate(previous)
        self.lru[new] = slot
        return slot


class BatchSlots:
    """Slots of one batch. ``owned`` says whether this object gives the slots back."""

    def __init__(self, table: SlotTable, owned: bool = True) -> None:
        self.table = table
        self.owned = owned
        self.slots: Dict[str, int] = {}

    def add(self, adapter: str) -> int:
        if adapter not in self.slots:
            self.slots[adapter] = self.table.claim(adapter)  # clean: close() vacates, or the adopter does when it is not owned
        return self.slots[adapter]

    def hand_over(self) -> Dict[str, int]:
        self.owned = False
        return self.slots

    def close(self) -> None:
        if not self.owned:
            return
        for slot in self.slots.values():
            self.table.vacate(slot)
        self.slots.clear()


class Executor:
    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.resident: Dict[str, int] = {}

    def run_batch(self, adapters: List[str], keep: bool) -> int:
        batch = BatchSlots(self.table)
        total = 0
        for name in adapters:
            total += batch.add(name)  # clean: near miss, the batch keeps the slot, then close or hand_over
        if keep:
            for name, slot in batch.hand_over().items():
                former = self.resident.pop(name, None)
                if former is not None:
                    self.table.vacate(former)
                self.resident[name] = slot
        batch.close()
        return total

    def dry_run(self, adapters: List[str]) -> bool:
        taken: List[int] = []
        fits = True
        for name in adapters:
            try:
                taken.append(self.table.claim(name))  # clean: near miss, the list is vacated after the caught exhaustion too
            except SlotsExhausted:
                fits = False
                break
        for slot in taken:
            self.table.vacate(slot)
        return fits

    def dry_run_pair(self, a: str, b: str) -> bool:
        try:
            first = self.table.claim(a)  # leak: exhaustion on the second claim is caught and the first is not vacated
            second = self.table.claim(b)  # clean: vacated right below
        except SlotsExhausted:
            return False
        self.table.vacate(second)
        self.table.vacate(first)
        return True

    def replace(self, name: str) -> None:
        fresh = self.table.claim(name)  # clean: stored as resident, the former one is vacated
        former = self.resident.get(name)
        self.resident[name] = fresh
        if former is not None:
            self.table.vacate(former)

    def shutdown(self) -> None:
        while self.resident:
            _, slot = self.resident.popitem()
            self.table.vacate(slot)


def main() -> None:
    table = SlotTable(6)
    store = WeightStore({"a": 8, "b": 16, "c": 128})
    lru = LRUManager(table, store)
    assert lru.activate("a") is not None and lru.activate("c") is None
    lru.preload("b")
    lru.commit_preload("b")
    lru.swap("a", "a2") if "a2" in store.ranks else None
    ex = Executor(table)
    ex.run_batch(["x", "y"], keep=True)
    ex.replace("x")
    assert not ex.dry_run(["q"] * 9)
    ex.dry_run_pair("q", "r")
    ex.shutdown()
    lru.deactivate("a")
    lru.deactivate("b")
    simple = SimpleManager(table, store)
    simple.activate("a")
    simple.deactivate("a")
    assert table.idle == 6


if __name__ == "__main__":
    main()
