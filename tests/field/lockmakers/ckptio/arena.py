"""Chunks of host memory with reference counts, and the upload lanes."""
from __future__ import annotations

import queue

import torch


class Chunk:
    def __init__(self, arena: ChunkArena, mem: torch.Tensor):
        self.arena = arena
        self.mem = mem
        self.refs = 0
        self.length = 0

    def retain(self) -> Chunk:
        self.refs += 1
        return self

    def drop(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.arena.reclaim(self)


class ChunkArena:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        slab = torch.empty(count, nbytes, dtype=torch.uint8)
        self._free: queue.LifoQueue[Chunk] = queue.LifoQueue()
        for row in slab.unbind(0):
            self._free.put(Chunk(self, row))

    def cut(self) -> Chunk | None:
        """A chunk with one reference, or None."""
        try:
            chunk = self._free.get_nowait()  # clean: returned to the caller with one reference
        except queue.Empty:
            return None
        chunk.refs, chunk.length = 1, 0
        return chunk

    def cut_many(self, n: int) -> list[Chunk]:
        """As many of n as there are."""
        chunks = []
        for _ in range(n):
            c = self.cut()  # clean: None ends the list, and the list is the caller's
            if c is None:
                break
            chunks.append(c)
        return chunks

    def reclaim(self, chunk: Chunk) -> None:
        self._free.put(chunk)


class Lanes:
    """A counter of parallel uploads."""

    def __init__(self, n: int):
        self._left = n

    def enter_lane(self) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def leave_lane(self) -> None:
        self._left += 1
