"""Background reader that fills regions ahead of the trainer."""
from __future__ import annotations

import threading
from collections import deque
from typing import BinaryIO, Deque, Iterator, Optional, Tuple

from .arena import Region
from .pool import HostPool

Filled = Tuple[Region, int]


class Prefetcher:
    def __init__(self, pool: HostPool, chunk: int, depth: int) -> None:
        self.pool = pool
        self.chunk = chunk
        self.depth = depth
        self._filled: Deque[Filled] = deque()
        self._cv = threading.Condition()
        self._eof = False

    def read_from(self, f: BinaryIO) -> None:
        while True:
            r = self.pool.reserve(self.chunk, timeout=30.0)  # leak: not cancelled when the read finds the end of the file
            if r is None:
                continue
            n = f.readinto(self.pool.arena.tensor(r).numpy())
            if n == 0:
                break
            with self._cv:
                self._cv.wait_for(lambda: len(self._filled) < self.depth)
                self._filled.append((r, n))
                self._cv.notify_all()
        with self._cv:
            self._eof = True
            self._cv.notify_all()

    def next_filled(self) -> Optional[Filled]:
        with self._cv:
            self._cv.wait_for(lambda: self._filled or self._eof)
            if not self._filled:
                return None
            item = self._filled.popleft()
            self._cv.notify_all()
            return item

    def chunks(self) -> Iterator[bytes]:
        while True:
            item = self.next_filled()
            if item is None:
                return
            r, n = item
            data = bytes(self.pool.arena.tensor(r)[:n].numpy())
            self.pool.cancel(r)
            yield data

    def stop(self) -> None:
        with self._cv:
            while self._filled:
                self.pool.cancel(self._filled.popleft()[0])
            self._eof = True
