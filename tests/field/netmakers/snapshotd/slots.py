"""Host-memory slots. A slot is counted: writers and uploaders each hold a reference."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class Slot:
    number: int
    table: "SlotTable"
    count: int = 0
    step: int = -1
    blobs: dict[str, bytes] = field(default_factory=dict)

    def hold(self) -> "Slot":
        with self.table.cond:
            self.count += 1
        return self

    def let_go(self) -> None:
        with self.table.cond:
            self.count -= 1
            if self.count == 0:
                self.blobs.clear()
                self.table.cond.notify()


class SlotTable:
    def __init__(self, n: int) -> None:
        self.cond = threading.Condition()
        self.slots = [Slot(i, self) for i in range(n)]

    def vacant(self) -> Slot | None:
        """A slot with one reference for the caller, or None."""
        with self.cond:
            for s in self.slots:
                if s.count == 0:
                    s.count = 1
                    return s
        return None

    def vacant_wait(self, timeout: float) -> Slot | None:
        with self.cond:
            if not self.cond.wait_for(lambda: any(s.count == 0 for s in self.slots), timeout):
                return None
            s = next(s for s in self.slots if s.count == 0)
            s.count = 1
            return s
