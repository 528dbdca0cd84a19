from __future__ import annotations

from contextlib import ExitStack
from typing import Dict, List, Optional, Tuple

from .comm import CommBuffer, CommBufferPool


class ExpertDispatcher:
    """All-to-all staging: one buffer per destination rank."""

    def __init__(self, pool: CommBufferPool, rank: int) -> None:
        self.pool = pool
        self.rank = rank
        self.staged: Dict[int, CommBuffer] = {}

    def stage(self, rank: int, tokens: int) -> None:
        buf = self.staged.get(rank)
        if buf is None:
            buf = self.staged[rank] = self.pool.acquire()  # leak: combine clears the table without releasing the local rank's buffer
        buf.write(tokens)

    def combine(self) -> int:
        total = 0
        for rank, buf in self.staged.items():
            if rank == self.rank:
                continue
            total += buf.fill
            self.pool.release(buf)
        self.staged.clear()
        return total

    def route(self, counts: List[int]) -> List[Tuple[int, int]]:
        sent: List[Tuple[int, int]] = []
        with ExitStack() as stack:
            for rank, n in enumerate(counts):
                buf = self.pool.acquire()  # clean: near miss, registered with the stack at once
                stack.callback(self.pool.release, buf)
                if n == 0:
                    continue
                buf.write(n)
                sent.append((rank, buf.fill))
        return sent

    def route_capped(self, counts: List[int], cap: int) -> List[Tuple[int, int]]:
        sent: List[Tuple[int, int]] = []
        with ExitStack() as stack:
            for rank, n in enumerate(counts):
                buf = self.pool.acquire()  # leak: the overflow rank breaks out before it is registered
                buf.write(n)
                if buf.fill > cap:
                    break
                stack.callback(self.pool.release, buf)
                sent.append((rank, buf.fill))
        return sent
