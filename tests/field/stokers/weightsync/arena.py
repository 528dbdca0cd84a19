from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import List, Optional

import torch


@dataclass(eq=False)
class Chunk:
    data: torch.Tensor
    used: int = 0

    def put(self, t: torch.Tensor) -> bool:
        n = t.numel() * t.element_size()
        if self.used + n > self.data.numel():
            return False
        self.data[self.used : self.used + n].copy_(t.contiguous().view(-1).view(torch.uint8))
        self.used += n
        return True


class ChunkArena:
    """Pinned chunks weights are packed into on their way to the rollout workers."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._idle: List[Chunk] = [
            Chunk(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)) for _ in range(count)
        ]

    def draw(self) -> Optional[Chunk]:
        with self._lock:
            if not self._idle:
                return None
            chunk = self._idle.pop()
        chunk.used = 0
        return chunk

    def refund(self, chunk: Chunk) -> None:
        with self._lock:
            self._idle.append(chunk)
