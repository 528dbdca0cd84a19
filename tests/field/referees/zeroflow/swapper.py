from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .aio import AioHandle
from .buffers import SwapBufferPool


@dataclass(eq=False)
class ParamInfo:
    name: str
    numel: int
    buffer_id: int = -1
    status: str = "remote"


class ParamSwapper:
    def __init__(self, pool: SwapBufferPool, aio: AioHandle, root: Path) -> None:
        self.pool = pool
        self.aio = aio
        self.root = root
        self.available: dict[str, ParamInfo] = {}
        self.reserved: list[int] = []

    def swap_in(self, params: list[ParamInfo]) -> bool:
        taken: list[ParamInfo] = []
        for p in params:
            if p.status == "available":
                continue
            bid = self.pool.allocate()  # clean: near miss, a partial swap-in is undone through taken, a full one is owned by available
            if bid is None:
                self.aio.wait()
                for q in taken:
                    self.pool.free(q.buffer_id)
                    q.buffer_id = -1
                return False
            p.buffer_id = bid
            taken.append(p)
            self.aio.submit_read(self.root / p.name, self.pool.data(bid, p.numel))
        self.aio.wait()
        for p in taken:
            p.status = "available"
            self.available[p.name] = p
        return True

    def release(self, p: ParamInfo) -> None:
        if self.available.pop(p.name, None) is None:
            return
        self.pool.free(p.buffer_id)
        p.buffer_id, p.status = -1, "remote"

    def reserve(self, n: int) -> int:
        while len(self.reserved) < n:
            bid = self.pool.allocate()  # clean: near miss, stays in reserved until unreserve
            if bid is None:
                break
            self.reserved.append(bid)
        return len(self.reserved)

    def unreserve(self) -> None:
        while self.reserved:
            self.pool.free(self.reserved.pop())

    def write_back(self, tensors: dict[str, torch.Tensor]) -> int:
        bids: list[int] = []
        for name, t in tensors.items():
            bid = self.pool.allocate()  # clean: near miss, the pool running dry flushes what is pending, at the end the rest is freed
            if bid is None:
                self._flush(bids)
                bid = self.pool.allocate()  # leak: this one is written but never appended to bids
                if bid is None:
                    return -1
                self.aio.submit_write(self.root / name, self.pool.data(bid, t.numel()).copy_(t))
                continue
            self.aio.submit_write(self.root / name, self.pool.data(bid, t.numel()).copy_(t))
            bids.append(bid)
        return self._flush(bids)

    def _flush(self, bids: list[int]) -> int:
        total = self.aio.wait() or 0
        for bid in bids:
            self.pool.free(bid)
        bids.clear()
        return total
