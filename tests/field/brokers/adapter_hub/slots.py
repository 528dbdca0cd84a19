from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Slot:
    index: int
    name: str = ""
    users: int = 0
    stamp: int = 0


@dataclass
class GpuSlots:
    slots: list[Slot] = field(default_factory=list)
    clock: int = 0

    @classmethod
    def with_size(cls, n: int) -> "GpuSlots":
        return cls([Slot(i) for i in range(n)])

    def enlist(self, name: str) -> Slot | None:
        """One more user of the slot that holds name; loads it into an unused slot first if need be."""
        self.clock += 1
        slot = next((s for s in self.slots if s.name == name), None)
        if slot is None:
            idle = [s for s in self.slots if s.users == 0]
            if not idle:
                return None
            slot = min(idle, key=lambda s: s.stamp)
            slot.name = name
        slot.users += 1
        slot.stamp = self.clock
        return slot

    def discharge(self, slot: Slot) -> None:
        slot.users -= 1

    def touch_all(self, names: list[str]) -> int:
        n = 0
        for name in names:
            slot = self.enlist(name)  # clean: near miss, discharged in the same turn
            if slot is None:
                break
            n += 1
            self.discharge(slot)
        return n
