"""Slots in a shared memory segment, and reference counted shard mappings."""
from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, Optional


class Slot:
    __slots__ = ("index", "view", "filled")

    def __init__(self, index: int, view: memoryview) -> None:
        self.index = index
        self.view = view
        self.filled = 0

    def write(self, data: bytes) -> None:
        self.view[: len(data)] = data
        self.filled = len(data)


class SlotRing:
    def __init__(self, n: int, slot_bytes: int) -> None:
        self._mem = mmap.mmap(-1, n * slot_bytes)
        whole = memoryview(self._mem)
        self._ready: Deque[Slot] = deque(
            Slot(i, whole[i * slot_bytes: (i + 1) * slot_bytes]) for i in range(n)
        )
        self._cv = threading.Condition()

    def grab(self, timeout: Optional[float] = None) -> Optional[Slot]:
        with self._cv:
            if not self._cv.wait_for(lambda: len(self._ready) > 0, timeout):
                return None
            slot = self._ready.popleft()
            slot.filled = 0
            return slot

    def put_back(self, slot: Slot) -> None:
        with self._cv:
            self._ready.append(slot)
            self._cv.notify()

    def grab_many(self, n: int, timeout: float) -> Optional[List[Slot]]:
        """n slots, or None if they do not come in time."""
        got: List[Slot] = []
        while len(got) < n:
            slot = self.grab(timeout)  # leak: the ones got before are lost when a later one does not come
            if slot is None:
                return None
            got.append(slot)
        return got

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        s = self.grab()  # clean: put back in finally
        try:
            yield s
        finally:
            self.put_back(s)


class ShardMap:
    """Maps token shards once each, with a count of their users."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._maps: Dict[str, mmap.mmap] = {}
        self._users: Dict[str, int] = {}

    def attach(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            fd = os.open(os.path.join(self.root, name), os.O_RDONLY)  # clean: closed after mapping
            self._maps[name] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            os.close(fd)
            self._users[name] = 0
        self._users[name] += 1
        return self._maps[name]

    def detach(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] == 0:
            self._maps.pop(name).close()
            del self._users[name]
