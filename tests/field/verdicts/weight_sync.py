"""Trainer -> rollout engine weight refresh in fixed-size buckets."""
from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


class Bucket:
    def __init__(self, ident: int, numel: int) -> None:
        self.ident = ident
        self.data = torch.empty(numel)
        self.names: list[tuple[str, int]] = []
        self.fill = 0

    def add(self, name: str, w: torch.Tensor) -> bool:
        n = w.numel()
        if self.fill + n > self.data.numel():
            return False
        self.data[self.fill : self.fill + n] = w.flatten()
        self.names.append((name, n))
        self.fill += n
        return True


class BucketDepot:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._depot = {i: Bucket(i, numel) for i in range(count)}
        self._out: dict[int, Bucket] = {}

    def withdraw(self) -> Bucket:
        ident = next(iter(self._depot))
        b = self._depot.pop(ident)
        b.fill = 0
        b.names = []
        self._out[ident] = b
        return b

    def deposit(self, b: Bucket) -> None:
        del self._out[b.ident]
        self._depot[b.ident] = b


@dataclass
class SyncStats:
    buckets: int = 0
    params: int = 0
    skipped: int = 0


def pack(params: Iterable[tuple[str, torch.Tensor]], depot: BucketDepot) -> Iterator[Bucket]:
    cur = depot.withdraw()  # clean: near miss, yielded when full or at the end, otherwise deposited
    for name, w in params:
        if not cur.add(name, w):
            yield cur
            cur = depot.withdraw()  # clean: near miss, same as the first one
            cur.add(name, w)
    if cur.fill:
        yield cur
    else:
        depot.deposit(cur)


def pack_simple(params: Iterable[tuple[str, torch.Tensor]], depot: BucketDepot) -> list[Bucket]:
    full: list[Bucket] = []
    cur = depot.withdraw()  # leak: the last bucket that is not full never reaches the list
    for name, w in params:
        if not cur.add(name, w):
            full.append(cur)
            cur = depot.withdraw()  # leak: the last bucket that is not full never reaches the list
            cur.add(name, w)
    return full


class WeightSender:
    def __init__(self, depot: BucketDepot, send: Callable[[Bucket], Awaitable[bool]]) -> None:
        self.depot = depot
        self.send = send
        self.queue: asyncio.Queue[Bucket | None] = asyncio.Queue()
        self.stats = SyncStats()
        self.version = 0

    async def sync(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        for b in pack(params, self.depot):  # clean: each bucket is deposited after the send
            await self.send(b)
            self.stats.buckets += 1
            self.depot.deposit(b)
        self.version += 1

    async def sync_or_stop(self, params: Iterable[tuple[str, torch.Tensor]]) -> bool:
        for b in pack(params, self.depot):  # leak: the bucket whose send failed is not deposited on return
            if not await self.send(b):
                return False
            self.depot.deposit(b)
        self.version += 1
        return True

    async def produce(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in params:
            b = self.depot.withdraw()  # clean: near miss, too large ones are deposited, the rest goes to the queue and consume deposits
            if not b.add(name, w):
                self.stats.skipped += 1
                self.depot.deposit(b)
                continue
            await self.queue.put(b)
        await self.queue.put(None)

    async def consume(self) -> None:
        while (b := await self.queue.get()) is not None:
            await self.send(b)
            self.depot.deposit(b)

    async def produce_tied(self, params: Iterable[tuple[str, torch.Tensor]], tied: set[str]) -> None:
        for name, w in params:
            b = self.depot.withdraw()  # leak: tied parameters are skipped after a bucket was withdrawn
            if name in tied:
                self.stats.skipped += 1
                continue
            b.add(name, w)
            await self.queue.put(b)
        await self.queue.put(None)

    async def ping(self) -> bool:
        b = self.depot.withdraw()  # clean: deposited before the answer is returned
        ok = await self.send(b)
        self.depot.deposit(b)
        return ok

    async def send_delta(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        b = self.depot.withdraw()  # leak: the unchanged case returns True early
        if torch.equal(old, new):
            return True
        b.add("delta", new - old)
        ok = await self.send(b)
        self.depot.deposit(b)
        return ok

    async def stream(self, shards: list[torch.Tensor]) -> AsyncIterator[str]:
        b = self.depot.withdraw()  # clean: near miss, every exit of the async generator meets finally
        try:
            for i, s in enumerate(shards):
                b.fill = 0
                if not b.add(f"shard{i}", s):
                    yield f"shard{i}: too large"
                    return
                await self.send(b)
                yield f"shard{i}: ok"
        finally:
            self.depot.deposit(b)

    def preflight(self, need: int) -> bool:
        held = []
        for _ in range(need):
            held.append(self.depot.withdraw())  # clean: all deposited below
        fits = all(h.data.numel() == self.depot.numel for h in held)
        for h in held:
            self.depot.deposit(h)
        return fits
