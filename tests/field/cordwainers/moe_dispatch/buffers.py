"""Expert buffers of a fixed capacity."""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class TokenBuffer:
    expert: int
    data: torch.Tensor
    filled: int = 0

    @property
    def room(self) -> int:
        return self.data.shape[0] - self.filled

    def push(self, x: torch.Tensor) -> int:
        n = min(self.room, x.shape[0])
        self.data[self.filled : self.filled + n] = x[:n]
        self.filled += n
        return n


class BufferPool:
    def __init__(self, n: int, capacity: int, dim: int) -> None:
        self._stock = [torch.empty(capacity, dim) for _ in range(n)]

    def fetch(self, expert: int) -> TokenBuffer | None:
        if not self._stock:
            return None
        return TokenBuffer(expert, self._stock.pop())

    def restock(self, buf: TokenBuffer) -> None:
        self._stock.append(buf.data)

    def restock_all(self, bufs: list[TokenBuffer]) -> None:
        while bufs:
            self.restock(bufs.pop())


def packed(pool: BufferPool, expert: int, x: torch.Tensor) -> TokenBuffer | None:
    buf = pool.fetch(expert)  # clean: filled and handed to the caller
    if buf is not None:
        buf.push(x)
    return buf


def spill_packed(pool: BufferPool, expert: int, x: torch.Tensor) -> list[TokenBuffer]:
    """As many buffers as the tokens need, or none at all."""
    bufs: list[TokenBuffer] = []
    at = 0
    while at < x.shape[0]:
        buf = packed(pool, expert, x[at:])  # leak: when the stock ends the buffers filled so far are dropped
        if buf is None:
            return []
        at += buf.filled
        bufs.append(buf)
    return bufs
