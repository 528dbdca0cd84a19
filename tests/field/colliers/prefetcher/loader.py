from __future__ import annotations

import os
import tempfile
from collections import deque
from typing import Deque, Optional

from .shards import ShardSet, chunks, read_chunk
from .staging import StagingPool

Item = tuple[bytearray, int]


class Prefetcher:
    def __init__(self, pool: StagingPool, ss: ShardSet, depth: int, chunk: int) -> None:
        self.pool = pool
        self.ss = ss
        self.depth = depth
        self.chunk = chunk
        self.q: Deque[Item] = deque()
        self.peeked: Optional[Item] = None

    def fill(self, i: int) -> None:
        while len(self.q) < self.depth:
            it = read_chunk(self.pool, self.ss, i, self.chunk)  # clean: queued, next or reset checks it in
            if it is None:
                return
            self.q.append(it)

    def next(self, i: int) -> Optional[bytes]:
        self.fill(i)
        if not self.q:
            return None
        b, n = self.q.popleft()
        out = bytes(b[:n])
        self.pool.checkin(b)
        return out

    def reset(self) -> None:
        for b, _ in self.q:
            self.pool.checkin(b)
        self.q.clear()

    def peek(self, i: int) -> Optional[bytes]:
        it = read_chunk(self.pool, self.ss, i, self.chunk)  # leak: a former peek is overwritten
        if it is None:
            return None
        self.peeked = it
        return bytes(it[0][:it[1]])

    def unpeek(self) -> None:
        if self.peeked is not None:
            self.pool.checkin(self.peeked[0])
            self.peeked = None

    def find(self, i: int, needle: bytes) -> bool:
        with self.pool.staged() as b:  # clean: context manager
            n = self.ss.file(i).readinto(b)  # type: ignore[attr-defined]
            return bytes(b[:n]).find(needle) >= 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        p = os.path.join(d, "s0.bin")
        with open(p, "wb") as f:  # clean: with block
            f.write(b"0123456789" * 5)
        pool = StagingPool(4, 64)
        ss = ShardSet([p])
        pf = Prefetcher(pool, ss, 2, 16)
        print(pf.next(0), pf.next(0), list(chunks(pool, ss, 0, 8)))
        pf.reset()
        print(pf.find(0, b"x"), pool.left())
        ss.close()
