from __future__ import annotations

import queue
import threading
from typing import Callable, Iterator

import torch

from .slabs import Arena, ArenaPool, Lease
from .source import ShardSource

Batch = tuple[Arena, int]


class Prefetcher:
    def __init__(self, pool: ArenaPool, source: ShardSource, depth: int) -> None:
        self.pool = pool
        self.source = source
        self.out: queue.Queue[Batch | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._spare: Arena | None = None

    def _copy(self, arena: Arena, raw: bytes) -> int:
        n = min(len(raw), arena.data.numel())
        arena.data[:n] = torch.frombuffer(bytearray(raw[:n]), dtype=torch.uint8)
        return n

    def fill(self, name: str) -> int:
        sent = 0
        for raw in self.source.raw(name):
            arena = self._spare or self.pool.rent()  # clean: near miss, put out, or kept as the spare when the queue is full
            if arena is None:
                break
            self._spare = None
            if not raw.strip():
                self._spare = arena
                continue
            try:
                self.out.put((arena, self._copy(arena, raw)), timeout=1.0)
            except queue.Full:
                self._spare = arena
                break
            sent += 1
        return sent

    def fill_filtered(self, name: str, keep: Callable[[bytes], bool]) -> int:
        sent = 0
        for raw in self.source.raw(name):
            arena = self.pool.rent()  # leak: what the filter refuses is skipped with the arena rented
            if arena is None:
                break
            n = self._copy(arena, raw)
            if not keep(raw):
                continue
            self.out.put((arena, n))
            sent += 1
        return sent

    def stop(self) -> None:
        self._stop.set()
        while True:
            try:
                item = self.out.get_nowait()  # clean: near miss, each arena found in the queue is unrented
            except queue.Empty:
                break
            if item is not None:
                self.pool.unrent(item[0])
        if self._spare is not None:
            self.pool.unrent(self._spare)
            self._spare = None


class Runner:
    def __init__(self, prefetcher: Prefetcher, step: Callable[[torch.Tensor], float | None]) -> None:
        self.prefetcher = prefetcher
        self.pool = prefetcher.pool
        self.step = step

    def batches(self) -> Iterator[torch.Tensor]:
        while (item := self.prefetcher.out.get()) is not None:  # clean: near miss, the finally unrents even if the consumer leaves
            arena, n = item
            try:
                yield arena.data[:n]
            finally:
                self.pool.unrent(arena)

    def train(self) -> float:
        total = 0.0
        while True:
            item = self.prefetcher.out.get()  # leak: a diverged step returns with the arena of the batch
            if item is None:
                return total
            arena, n = item
            loss = self.step(arena.data[:n])
            if loss is None:
                return total
            total += loss
            self.pool.unrent(arena)

    def peek(self, it: Iterator[bytes]) -> int:
        n = 0
        with Lease(self.pool) as arena:
            if arena is not None:
                n = self.prefetcher._copy(arena, next(it))
        return n
