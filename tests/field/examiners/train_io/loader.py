"""Feeds slabs to a consumer function."""
from __future__ import annotations

from typing import Callable, List, Optional

from .reader import ShardReader
from .slabs import Slab, SlabArena, SlabGuard

Consume = Callable[[memoryview], bool]


class Loader:
    def __init__(self, arena: SlabArena, consume: Consume):
        self.arena = arena
        self.consume = consume
        self.reader = ShardReader(arena)
        self.queue: List[Slab] = []

    def run(self, path: str) -> int:
        rounds = 0
        for slab in self.reader.slabs(path):  # clean: near miss, given back before the break is tested
            more = self.consume(memoryview(slab.buf)[: slab.used])
            self.arena.back(slab)
            rounds += 1
            if not more:
                break
        return rounds

    def queue_up(self, path: str, limit: int) -> int:
        for slab in self.reader.slabs(path):  # leak: the slab that arrives at a full queue is dropped by the break
            if len(self.queue) >= limit:
                break
            self.queue.append(slab)
        return len(self.queue)

    def drain(self) -> None:
        while self.queue:
            slab = self.queue.pop()
            self.consume(memoryview(slab.buf)[: slab.used])
            self.arena.back(slab)

    def sniff(self, path: str) -> Optional[bytes]:
        slab = self.reader.first(path)  # leak: the head is copied out and the slab is not given back
        if slab is None:
            return None
        return bytes(slab.buf[:16])

    def head(self, path: str) -> bytes:
        slab = self.reader.first(path)  # clean: given back after the copy
        if slab is None:
            return b""
        out = bytes(slab.buf[:16])
        self.arena.back(slab)
        return out

    def scratch_sum(self, values: bytes) -> int:
        with SlabGuard(self.arena) as guard:  # leak: the slab is detached from the guard and kept nowhere
            slab = guard.detach()
            if slab is None:
                return 0
            n = min(len(values), self.arena.size)
            slab.buf[:n] = values[:n]
            return sum(slab.buf[:n])
