"""Slots for activations in flight between pipeline stages."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, List, Optional


@dataclass
class ActivationSlot:
    index: int
    value: Any = None
    grads: List[Any] = field(default_factory=list)


class SlotPool:
    def __init__(self, n: int) -> None:
        self._free = [ActivationSlot(i) for i in range(n)]

    def grab(self) -> Optional[ActivationSlot]:
        return self._free.pop() if self._free else None

    def ungrab(self, slot: ActivationSlot) -> None:
        slot.value = None
        slot.grads.clear()
        self._free.append(slot)

    @contextmanager
    def temporary(self) -> Iterator[Optional[ActivationSlot]]:
        slot = self.grab()  # clean: near miss, given back in finally when there was one
        try:
            yield slot
        finally:
            if slot is not None:
                self.ungrab(slot)

    @contextmanager
    def temporary_pair(self) -> Iterator[Any]:
        a = self.grab()  # leak: no finally, an error that the caller survives skips both returns
        b = self.grab()  # leak: lost together with a
        yield a, b
        for slot in (a, b):
            if slot is not None:
                self.ungrab(slot)

    def free_count(self) -> int:
        return len(self._free)
