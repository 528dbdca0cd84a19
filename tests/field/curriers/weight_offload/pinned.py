"""Pinned host memory in fixed chunks."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional


@dataclass
class PinnedChunk:
    index: int
    data: bytearray


class PinnedPool:
    def __init__(self, n: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._idle: List[PinnedChunk] = [PinnedChunk(i, bytearray(chunk_bytes)) for i in range(n)]

    def get(self) -> Optional[PinnedChunk]:
        return self._idle.pop() if self._idle else None

    def put(self, chunk: PinnedChunk) -> None:
        self._idle.append(chunk)

    def get_many(self, n: int) -> Optional[List[PinnedChunk]]:
        out: List[PinnedChunk] = []
        for _ in range(n):
            chunk = self.get()  # clean: near miss, put back one by one when there are too few
            if chunk is None:
                self.put_many(out)
                return None
            out.append(chunk)
        return out

    def get_upto(self, n: int, at_least: int) -> Optional[List[PinnedChunk]]:
        out: List[PinnedChunk] = []
        while len(out) < n:
            chunk = self.get()  # leak: fewer than at_least returns None and drops those gathered
            if chunk is None:
                break
            out.append(chunk)
        if len(out) < at_least:
            return None
        return out

    def put_many(self, chunks: List[PinnedChunk]) -> None:
        for chunk in chunks:
            self.put(chunk)

    @property
    def idle(self) -> int:
        return len(self._idle)
