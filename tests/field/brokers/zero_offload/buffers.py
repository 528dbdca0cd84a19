from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class SwapBuffer:
    index: int
    data: torch.Tensor
    filled: int = 0

    def append(self, t: torch.Tensor) -> bool:
        n = t.numel()
        if self.filled + n > self.data.numel():
            return False
        self.data[self.filled : self.filled + n].copy_(t.flatten())
        self.filled += n
        return True


class SwapBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._all = [SwapBuffer(i, torch.empty(numel)) for i in range(count)]
        self._free = list(range(count))

    def request(self) -> SwapBuffer | None:
        if not self._free:
            return None
        buf = self._all[self._free.pop()]
        buf.filled = 0
        return buf

    def request_many(self, n: int) -> list[SwapBuffer]:
        if n > len(self._free):
            return []
        picked = [self._free.pop() for _ in range(n)]
        for i in picked:
            self._all[i].filled = 0
        return [self._all[i] for i in picked]

    def relinquish(self, buf: SwapBuffer) -> None:
        self._free.append(buf.index)
