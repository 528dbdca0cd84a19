"""Arena of fixed-size activation chunks for million-token prefill."""
from __future__ import annotations

import threading
from typing import List, Optional, Sequence

import numpy as np


class Chunk:
    __slots__ = ("slot", "tensor")

    def __init__(self, slot: int, tensor: np.ndarray) -> None:
        self.slot = slot
        self.tensor = tensor


class ChunkArena:
    def __init__(self, n: int, tokens: int, hidden: int) -> None:
        self._store = np.zeros((n, tokens, hidden), dtype=np.float32)
        self._open = list(range(n))
        self._lock = threading.RLock()
        self.tokens = tokens

    def take(self) -> Optional[Chunk]:
        with self._lock:
            if not self._open:
                return None
            slot = self._open.pop()
            return Chunk(slot, self._store[slot])

    def take_run(self, n: int) -> Optional[List[Chunk]]:
        """n chunks or None."""
        with self._lock:
            if len(self._open) < n:
                return None
            return [self.take() for _ in range(n)]  # clean: near miss, the count was checked under the same lock, all are returned

    def take_upto(self, n: int, at_least: int) -> List[Chunk]:
        run: List[Chunk] = []
        for _ in range(n):
            c = self.take()  # leak: fewer than at_least gives an empty list and loses what was taken
            if c is None:
                break
            run.append(c)
        if len(run) < at_least:
            return []
        return run

    def untake(self, chunk: Chunk) -> None:
        with self._lock:
            self._open.append(chunk.slot)

    def untake_all(self, chunks: Sequence[Chunk]) -> None:
        for c in chunks:
            self.untake(c)
