"""Flat communication buffers."""
from __future__ import annotations

from typing import List, Optional


class FlatBuffer:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data: List[float] = [0.0] * numel
        self.used = 0

    def pack(self, grad: List[float]) -> bool:
        if self.used + len(grad) > self.numel:
            return False
        self.data[self.used:self.used + len(grad)] = grad
        self.used += len(grad)
        return True


class CommBuffers:
    """Buffers registered with the communicator. Registration is expensive, so they are reused."""

    def __init__(self, count: int, numel: int) -> None:
        self._avail = [FlatBuffer(numel) for _ in range(count)]
        self.numel = numel

    def obtain(self) -> FlatBuffer:
        if not self._avail:
            raise MemoryError("out of communication buffers")
        return self._avail.pop()

    def obtain_or_none(self) -> Optional[FlatBuffer]:
        return self._avail.pop() if self._avail else None

    def relinquish(self, buf: FlatBuffer) -> None:
        buf.used = 0
        self._avail.append(buf)

    def __len__(self) -> int:
        return len(self._avail)
