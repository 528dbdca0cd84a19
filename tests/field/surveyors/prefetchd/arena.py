from __future__ import annotations

from collections import deque
from multiprocessing import shared_memory
from threading import Condition
from typing import Optional


class ShmBlock:
    def __init__(self, index: int, view: memoryview) -> None:
        self.index = index
        self.view = view
        self.filled = 0

    def write(self, payload: bytes) -> bool:
        if len(payload) > len(self.view):
            return False
        self.view[: len(payload)] = payload
        self.filled = len(payload)
        return True


class ShmArena:
    def __init__(self, name: str, blocks: int, block_bytes: int) -> None:
        self.shm = shared_memory.SharedMemory(name=name, create=True, size=blocks * block_bytes)
        self._free: deque[ShmBlock] = deque(
            ShmBlock(i, self.shm.buf[i * block_bytes : (i + 1) * block_bytes]) for i in range(blocks)
        )
        self._changed = Condition()

    def attach(self, timeout: float) -> Optional[ShmBlock]:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.popleft()

    def detach(self, block: ShmBlock) -> None:
        block.filled = 0
        with self._changed:
            self._free.append(block)
            self._changed.notify()
