from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator


class Chunk:
    __slots__ = ("pool", "mem", "length", "shard", "users")

    def __init__(self, pool: "ChunkPool", size: int) -> None:
        self.pool = pool
        self.mem = bytearray(size)
        self.length = 0
        self.shard = ""
        self.users = 0

    def share(self) -> "Chunk":
        with self.pool.lock:
            self.users += 1
        return self

    def unref(self) -> None:
        with self.pool.lock:
            self.users -= 1
            if self.users == 0:
                self.pool._put(self)

    def payload(self) -> memoryview:
        return memoryview(self.mem)[: self.length]


class ChunkPool:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self._spare = [Chunk(self, size) for _ in range(count)]
        self.starved = 0

    def obtain(self, shard: str) -> Chunk | None:
        with self.lock:
            if not self._spare:
                self.starved += 1
                return None
            c = self._spare.pop()  # clean: returned with one user
            c.users = 1
            c.length = 0
            c.shard = shard
            return c

    def _put(self, c: Chunk) -> None:
        self._spare.append(c)

    def resize_spare(self, size: int) -> int:
        """Spare chunks that are already long enough stay, the others are remade."""
        with self.lock:
            kept = []
            while self._spare:
                c = self._spare.pop()  # leak: a chunk that is too small is not replaced as the docstring says
                if len(c.mem) >= size:
                    kept.append(c)
            self._spare = kept
            return len(kept)


@contextmanager
def pooled(pool: ChunkPool, shard: str) -> Iterator[Chunk | None]:
    c = pool.obtain(shard)  # clean: finally
    try:
        yield c
    finally:
        if c is not None:
            c.unref()
