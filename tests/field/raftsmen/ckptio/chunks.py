"""Chunks of one big bytearray, counted per chunk."""
from __future__ import annotations

import threading
from typing import List, Optional


class ChunkLease:
    """A reference to a chunk.  `dup()` makes another, `end()` drops this one."""

    __slots__ = ("arena", "index", "_ended")

    def __init__(self, arena: "ChunkArena", index: int) -> None:
        self.arena = arena
        self.index = index
        self._ended = False

    @property
    def mem(self) -> memoryview:
        return self.arena.mem(self.index)

    def dup(self) -> "ChunkLease":
        self.arena._incr(self.index)
        return ChunkLease(self.arena, self.index)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.arena._decr(self.index)

    def __enter__(self) -> memoryview:
        return self.mem

    def __exit__(self, *exc) -> None:
        self.end()


class ChunkArena:
    def __init__(self, count: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._store = memoryview(bytearray(count * chunk_bytes))
        self._counts = [0] * count
        self._cv = threading.Condition()

    def mem(self, i: int) -> memoryview:
        return self._store[i * self.chunk_bytes : (i + 1) * self.chunk_bytes]

    def grant(self, wait: bool = True) -> Optional[ChunkLease]:
        with self._cv:
            while True:
                for i, c in enumerate(self._counts):
                    if c == 0:
                        self._counts[i] = 1
                        return ChunkLease(self, i)
                if not wait:
                    return None
                self._cv.wait()

    def grant_many(self, n: int) -> Optional[List[ChunkLease]]:
        """n chunks at once or None, never some."""
        got: List[ChunkLease] = []
        for _ in range(n):
            c = self.grant(wait=False)  # clean: those got are ended when one is missing
            if c is None:
                for g in got:
                    g.end()
                return None
            got.append(c)
        return got

    def _incr(self, i: int) -> None:
        with self._cv:
            self._counts[i] += 1

    def _decr(self, i: int) -> None:
        with self._cv:
            self._counts[i] -= 1
            if self._counts[i] == 0:
                self._cv.notify_all()
