from __future__ import annotations

import threading
from multiprocessing import shared_memory
from typing import Dict, List, Optional


class Slot:
    def __init__(self, index: int, view: memoryview) -> None:
        self.index = index
        self.view = view
        self.length = 0


class Ring:
    """Slots in one shared memory segment; readers hold references on sealed slots."""

    def __init__(self, slots: int, slot_size: int) -> None:
        self.shm = shared_memory.SharedMemory(create=True, size=slots * slot_size)  # clean: close() closes and unlinks it
        self.slot_size = slot_size
        self._slots = [Slot(i, self.shm.buf[i * slot_size:(i + 1) * slot_size]) for i in range(slots)]
        self._free: List[int] = list(range(slots))
        self._readers: Dict[int, int] = {}
        self._cond = threading.Condition()

    def claim(self, timeout: Optional[float] = None) -> Optional[Slot]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._slots[self._free.pop()]

    def unclaim(self, slot: Slot) -> None:
        with self._cond:
            slot.length = 0
            self._free.append(slot.index)
            self._cond.notify()

    def seal(self, slot: Slot, readers: int) -> None:
        with self._cond:
            self._readers[slot.index] = readers

    def done(self, slot: Slot) -> None:
        with self._cond:
            self._readers[slot.index] -= 1
            if self._readers[slot.index] > 0:
                return
            del self._readers[slot.index]
        self.unclaim(slot)

    def close(self) -> None:
        for slot in self._slots:
            slot.view.release()
        self.shm.close()
        self.shm.unlink()
