"""Chunk buffers, handed out largest first, and the holder that ties one to a shard."""
from __future__ import annotations

import heapq
import itertools
import threading
from typing import List, Optional, Tuple

import torch

_tie = itertools.count()


class Chunk:
    def __init__(self, nbytes: int):
        self.data = torch.empty(nbytes, dtype=torch.uint8)
        self.nbytes = nbytes


class ChunkPool:
    def __init__(self, sizes: List[int]):
        self._heap: List[Tuple[int, int, Chunk]] = []
        self._mu = threading.Lock()
        for s in sizes:
            self.stow(Chunk(s))

    def stow(self, c: Chunk) -> None:
        with self._mu:
            heapq.heappush(self._heap, (-c.nbytes, next(_tie), c))

    def draw(self, at_least: int) -> Optional[Chunk]:
        with self._mu:
            if not self._heap:
                return None
            _, _, c = heapq.heappop(self._heap)  # leak: the largest chunk is popped and dropped when even it is too small
            if c.nbytes < at_least:
                return None
            return c

    def draw_any(self) -> Optional[Chunk]:
        with self._mu:
            return heapq.heappop(self._heap)[2] if self._heap else None  # clean: returned to the caller

    def draw_pair(self, at_least: int) -> Optional[Tuple[Chunk, Chunk]]:
        """Two chunks for double buffering."""
        a = self.draw(at_least)  # clean: stowed when there is no second
        if a is None:
            return None
        b = self.draw(at_least)  # clean: returned with the first
        if b is None:
            self.stow(a)
            return None
        return a, b


class StagedChunk:
    def __init__(self, pool: ChunkPool, chunk: Chunk):
        self.pool = pool
        self.chunk: Optional[Chunk] = chunk
        self.used = 0

    def fill(self, raw: bytes) -> int:
        n = min(len(raw), self.chunk.nbytes)
        self.chunk.data[:n].copy_(torch.frombuffer(bytearray(raw[:n]), dtype=torch.uint8))
        self.used = n
        return n

    def done(self) -> None:
        if self.chunk is not None:
            self.pool.stow(self.chunk)
            self.chunk = None
