from __future__ import annotations

import threading
from typing import Optional

import numpy as np


class Chunk:
    __slots__ = ("key", "data", "length", "refs")

    def __init__(self, key: int, capacity: int, width: int) -> None:
        self.key = key
        self.data = np.zeros((capacity, width), dtype=np.float32)
        self.length = 0
        self.refs = 0

    @property
    def full(self) -> bool:
        return self.length == len(self.data)

    def append(self, row: np.ndarray) -> None:
        self.data[self.length] = row
        self.length += 1


class ChunkPool:
    def __init__(self, count: int, capacity: int, width: int) -> None:
        self._chunks = [Chunk(i, capacity, width) for i in range(count)]
        self._free = list(self._chunks)
        self._lock = threading.Lock()

    def take_chunk(self) -> Optional[Chunk]:
        with self._lock:
            if not self._free:
                return None
            chunk = self._free.pop()
            chunk.length = 0
            chunk.refs = 1
            return chunk

    def retain_chunk(self, chunk: Chunk) -> Chunk:
        with self._lock:
            chunk.refs += 1
        return chunk

    def drop_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            chunk.refs -= 1
            if chunk.refs == 0:
                self._free.append(chunk)
