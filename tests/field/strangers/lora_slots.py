"""Slots for LoRA adapters in the stacked weight tensors."""
from __future__ import annotations

import abc
from collections import OrderedDict


class SlotProvider(abc.ABC):
    @abc.abstractmethod
    def reserve(self) -> int: ...

    @abc.abstractmethod
    def unreserve(self, slot: int) -> None: ...


class ArraySlots(SlotProvider):
    def __init__(self, n: int) -> None:
        self._vacant = list(reversed(range(n)))

    def reserve(self) -> int:
        return self._vacant.pop()

    def unreserve(self, slot: int) -> None:
        self._vacant.append(slot)


class AdapterManager:
    def __init__(self, slots: SlotProvider, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.active: OrderedDict[str, int] = OrderedDict()
        self.pinned: dict[str, int] = {}

    def activate(self, name: str) -> int:
        if name in self.active:
            self.active.move_to_end(name)
            return self.active[name]
        if len(self.active) >= self.capacity:
            _, oldest = self.active.popitem(last=False)
            self.slots.unreserve(oldest)
        slot = self.slots.reserve()  # clean: near miss, evicted or deactivated later
        self.active[name] = slot
        return slot

    def deactivate(self, name: str) -> bool:
        slot = self.active.pop(name, None)
        if slot is None:
            return False
        self.slots.unreserve(slot)
        return True

    def pin(self, name: str) -> int:
        self.pinned[name] = self.slots.reserve()  # leak: pinning a name again overwrites its slot
        return self.pinned[name]

    def unpin(self, name: str) -> None:
        slot = self.pinned.pop(name)
        self.slots.unreserve(slot)

    def try_load(self, name: str, weights: dict) -> bool:
        slot = self.slots.reserve()  # leak: slot 0 is falsy and stays reserved
        ok = name in weights
        if slot:
            self.slots.unreserve(slot)
        return ok

    def dry_run(self, names: list[str]) -> int:
        taken = [self.slots.reserve() for _ in names]  # clean: near miss, all given back through a loop on an alias
        rows = taken
        count = len(set(rows))
        while rows:
            self.slots.unreserve(rows.pop())
        return count

    def close(self) -> None:
        for table in (self.active, self.pinned):
            for slot in table.values():
                self.slots.unreserve(slot)
            table.clear()
