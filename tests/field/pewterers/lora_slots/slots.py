"""Device slots for LoRA adapters; a pinned slot is never evicted."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional


class AdapterSlot:
    __slots__ = ("index", "name", "pins", "weights")

    def __init__(self, index: int) -> None:
        self.index = index
        self.name: Optional[str] = None
        self.pins = 0
        self.weights: bytes = b""


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._mutex = threading.Lock()
        self._slots = [AdapterSlot(i) for i in range(count)]
        self._by_name: Dict[str, AdapterSlot] = {}

    def pin(self, name: str) -> Optional[AdapterSlot]:
        with self._mutex:
            slot = self._by_name.get(name)
            if slot is None:
                slot = next((s for s in self._slots if s.pins == 0), None)
                if slot is None:
                    return None
                if slot.name is not None:
                    del self._by_name[slot.name]
                slot.name, slot.weights = name, b""
                self._by_name[name] = slot
            slot.pins += 1
            return slot

    def unpin(self, slot: AdapterSlot) -> None:
        with self._mutex:
            slot.pins -= 1

    def forget(self, name: str) -> bool:
        self._mutex.acquire()  # leak: an unknown adapter returns False with the mutex taken
        slot = self._by_name.get(name)
        if slot is None:
            return False
        busy = slot.pins > 0
        if not busy:
            del self._by_name[name]
            slot.name, slot.weights = None, b""
        self._mutex.release()
        return not busy

    def resident(self) -> List[str]:
        self._mutex.acquire()  # clean: near miss, finally releases after the return value is built
        try:
            return sorted(self._by_name)
        finally:
            self._mutex.release()

    def pinned(self) -> int:
        with self._mutex:
            return sum(s.pins for s in self._slots)

    @contextmanager
    def pinning(self, name: str) -> Iterator[AdapterSlot]:
        slot = self.pin(name)  # clean: unpinned in finally
        if slot is None:
            raise LookupError(f"no slot for {name}")
        try:
            yield slot
        finally:
            self.unpin(slot)
