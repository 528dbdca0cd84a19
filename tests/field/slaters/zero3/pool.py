"""Device buffers for gathered parameters."""
from __future__ import annotations

from typing import List, Optional


class ParamBuffer:
    __slots__ = ("numel", "values")

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.values: List[float] = [0.0] * numel


class ParamBufferPool:
    def __init__(self, sizes: List[int], per_size: int) -> None:
        self._bins = {n: [ParamBuffer(n) for _ in range(per_size)] for n in sorted(set(sizes))}
        self.lent = 0

    def lend(self, numel: int) -> Optional[ParamBuffer]:
        for size, items in self._bins.items():
            if size >= numel and items:
                self.lent += 1
                return items.pop()
        return None

    def hand_back(self, buf: ParamBuffer) -> None:
        self.lent -= 1
        self._bins[buf.numel].append(buf)
