from __future__ import annotations

import threading
from typing import Optional

import torch


class MemoryObj:
    def __init__(self, owner: "MemoryAllocator", index: int, tensor: torch.Tensor) -> None:
        self._owner = owner
        self.index = index
        self.tensor = tensor
        self.valid = 0
        self._refs = 1
        self._lock = threading.Lock()

    def ref_count_up(self) -> None:
        with self._lock:
            self._refs += 1

    def ref_count_down(self) -> None:
        with self._lock:
            self._refs -= 1
            dead = self._refs == 0
        if dead:
            self._owner.free(self)


class MemoryAllocator:
    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._base = torch.empty(chunks, chunk_bytes, dtype=torch.uint8, pin_memory=True)
        self._free = list(range(chunks))
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Optional[MemoryObj]:
        if nbytes > self.chunk_bytes:
            return None
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
        obj = MemoryObj(self, index, self._base[index])
        obj.valid = nbytes
        return obj

    def free(self, obj: MemoryObj) -> None:
        with self._lock:
            self._free.append(obj.index)
