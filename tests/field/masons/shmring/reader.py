from __future__ import annotations

import queue
from multiprocessing import shared_memory
from typing import Iterator, List, Optional

from .ring import Ring, Slot


class Reader:
    def __init__(self, ring: Ring, inbox: "queue.Queue[Optional[Slot]]") -> None:
        self.ring = ring
        self.inbox = inbox

    def next_slot(self) -> Optional[Slot]:
        return self.inbox.get()

    def read(self) -> Optional[bytes]:
        slot = self.next_slot()  # clean: copied out and done
        if slot is None:
            return None
        data = bytes(slot.view[:slot.length])
        self.ring.done(slot)
        return data

    def read_if(self, prefix: bytes) -> Optional[bytes]:
        slot = self.next_slot()  # leak: another prefix returns None without done
        if slot is None:
            return None
        data = bytes(slot.view[:slot.length])
        if not data.startswith(prefix):
            return None
        self.ring.done(slot)
        return data

    def views(self) -> Iterator[memoryview]:
        while True:
            slot = self.next_slot()  # clean: near miss, done by the finally when the consumer goes on or closes
            if slot is None:
                return
            try:
                yield slot.view[:slot.length]
            finally:
                self.ring.done(slot)

    def skip(self, n: int) -> int:
        held: List[Slot] = []
        while len(held) < n:
            slot = self.next_slot()  # clean: near miss, the break on the end mark comes before the loop of done
            if slot is None:
                break
            held.append(slot)
        for slot in held:
            self.ring.done(slot)
        return len(held)


def segment_size(name: str) -> int:
    try:
        shm = shared_memory.SharedMemory(name=name)  # clean: closed below, and a missing one holds nothing
    except FileNotFoundError:
        return 0
    size = shm.size
    shm.close()
    return size
