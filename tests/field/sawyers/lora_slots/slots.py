"""GPU-resident LoRA slots; the lowest free index is handed out first."""
from __future__ import annotations

import heapq
import threading
from contextlib import contextmanager
from typing import Iterator, Optional


class NoSlot(RuntimeError):
    pass


class AdapterSlots:
    def __init__(self, max_loras: int) -> None:
        self._heap = list(range(max_loras))
        heapq.heapify(self._heap)
        self._names: dict[int, str] = {}
        self._mu = threading.Lock()

    def activate(self, name: str) -> int:
        with self._mu:
            if not self._heap:
                raise NoSlot(name)
            slot = heapq.heappop(self._heap)
            self._names[slot] = name
            return slot

    def deactivate(self, slot: int) -> None:
        with self._mu:
            del self._names[slot]
            heapq.heappush(self._heap, slot)

    def try_activate(self, name: str) -> Optional[int]:
        try:
            return self.activate(name)  # clean: handed to the caller
        except NoSlot:
            return None

    @contextmanager
    def transient(self, name: str) -> Iterator[int]:
        slot = self.activate(name)  # clean: the finally gives it back
        try:
            yield slot
        finally:
            self.deactivate(slot)

    def swap_pair(self, first: str, second: str) -> Optional[tuple[int, int]]:
        a = self.try_activate(first)  # leak: kept when the second slot is refused
        b = self.try_activate(second)  # clean: returned with the first, None otherwise
        if a is None or b is None:
            if b is not None:
                self.deactivate(b)
            return None
        return a, b
