"""Asynchronous input feed: remote objects fetched within a byte budget, decoded in workers, and batched."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("feed")

Fetch = Callable[[str], Awaitable[bytes]]


@dataclass
class Grant:
    nbytes: int
    parts: list = field(default_factory=list)


class ByteBudget:
    """Bytes in memory between fetch and batch. A grant is repaid when its bytes are gone."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self._room = asyncio.Condition()

    async def take(self, nbytes: int) -> Grant:
        nbytes = min(nbytes, self.total)
        async with self._room:
            await self._room.wait_for(lambda: self.left >= nbytes)
            self.left -= nbytes
        return Grant(nbytes)

    def take_now(self, nbytes: int) -> Optional[Grant]:
        if self.left < nbytes:
            return None
        self.left -= nbytes
        return Grant(nbytes)

    async def repay(self, grant: Grant) -> None:
        async with self._room:
            self.left += grant.nbytes
            grant.nbytes = 0
            self._room.notify_all()


@dataclass
class Item:
    name: str
    data: bytes
    grant: Grant


class Holding:
    """`async with Holding(budget, n)`: the grant is repaid at the end, unless it was detached."""

    def __init__(self, budget: ByteBudget, nbytes: int) -> None:
        self.budget = budget
        self.nbytes = nbytes
        self.grant: Optional[Grant] = None

    async def __aenter__(self) -> "Holding":
        self.grant = await self.budget.take(self.nbytes)  # clean: near miss, exit repays, or detach()
        return self

    def detach(self) -> Grant:
        grant, self.grant = self.grant, None
        return grant

    async def __aexit__(self, *exc) -> None:
        if self.grant is not None:
            await self.budget.repay(self.grant)
            self.grant = None


class Feed:
    def __init__(self, budget: ByteBudget, fetch: Fetch, sizes: dict[str, int], depth: int) -> None:
        self.budget = budget
        self.fetch = fetch
        self.sizes = sizes
        self.ready: "asyncio.Queue[Optional[Item]]" = asyncio.Queue(depth)
        self.slots = asyncio.Semaphore(depth)
        self.failed: list[str] = []
        self.pinned: dict[str, Item] = {}

    # producers ----------------------------------------------------------------------------------------
    async def produce(self, names: list[str]) -> None:
        for name in names:
            grant = await self.budget.take(self.sizes[name])  # leak: an empty object continues past repay
            data = await self.fetch(name)
            if not data:
                self.failed.append(name)
                continue
            await self.ready.put(Item(name, data, grant))
        await self.ready.put(None)

    async def produce_held(self, names: list[str]) -> None:
        for name in names:
            async with Holding(self.budget, self.sizes[name]) as hold:  # clean: near miss, goes into item
                data = await self.fetch(name)
                if not data:
                    self.failed.append(name)
                    continue
                await self.ready.put(Item(name, data, hold.detach()))
        await self.ready.put(None)

    async def fetch_item(self, name: str) -> Optional[Item]:
        grant = self.budget.take_now(self.sizes[name])  # clean: repaid when empty, else in the item returned
        if grant is None:
            return None
        data = await self.fetch(name)
        if not data:
            await self.budget.repay(grant)
            return None
        return Item(name, data, grant)

    async def first_bytes(self, name: str, n: int) -> bytes:
        item = await self.fetch_item(name)  # leak: the prefix leaves, the item's grant is not repaid
        if item is None:
            return b""
        return item.data[:n]

    async def with_retries(self, name: str, tries: int) -> Optional[Item]:
        """Fetches until the size is as announced."""
        for attempt in range(tries):
            item = await self.fetch_item(name)  # leak: a short item is tried again without repaying
            if item is None:
                await asyncio.sleep(0.05 * attempt)
                continue
            if len(item.data) == self.sizes[name]:
                return item
            log.warning("%s: %d of %d bytes", name, len(item.data), self.sizes[name])
        return None

    # consumers ----------------------------------------------------------------------------------------
    async def items(self) -> AsyncIterator[bytes]:
        while True:
            item = await self.ready.get()
            if item is None:
                return
            data = item.data
            await self.budget.repay(item.grant)
            yield data

    async def batches(self, size: int, join: Callable[[list[bytes]], object]) -> AsyncIterator[object]:
        batch: list[bytes] = []
        async for data in self.items():
            batch.append(data)
            if len(batch) == size:
                yield join(batch)
                batch = []
        if batch:
            yield join(batch)

    # bounded side jobs ----------------------------------------------------------------------------------
    async def decode(self, item: Item, run: Callable[[bytes], object], limit: int) -> Optional[object]:
        await self.slots.acquire()  # leak: an item over the limit returns with the slot
        if len(item.data) > limit:
            self.failed.append(item.name)
            return None
        out = await asyncio.to_thread(run, item.data)
        self.slots.release()
        return out

    async def decode_many(self, datas: list[bytes], run: Callable[[bytes], object]) -> list:
        async def one(data: bytes):
            try:
                return await asyncio.to_thread(run, data)
            finally:
                self.slots.release()

        tasks = []
        for data in datas:
            await self.slots.acquire()  # clean: near miss, the task releases the slot
            tasks.append(asyncio.create_task(one(data)))
        return await asyncio.gather(*tasks)

    # pinned objects (tokenizer tables, class maps) ------------------------------------------------------
    async def pin(self, name: str) -> bool:
        if name in self.pinned:
            return True
        item = await self.fetch_item(name)  # clean: near miss, unpin() repays the item's grant
        if item is None:
            return False
        self.pinned[name] = item
        return True

    async def unpin(self, name: str) -> None:
        item = self.pinned.pop(name, None)
        if item is not None:
            await self.budget.repay(item.grant)

    async def refresh(self, name: str) -> bool:
        """A pinned object again, when its size has changed meanwhile."""
        grant = await self.budget.take(self.sizes[name])  # leak: repaid only when the bytes were equal
        data = await self.fetch(name)
        if name in self.pinned and self.pinned[name].data == data:
            await self.budget.repay(grant)
            return False
        if name in self.pinned:
            self.pinned[name].data = data
        return True

    async def close(self) -> None:
        for name in list(self.pinned):
            await self.unpin(name)
        while not self.ready.empty():
            item = self.ready.get_nowait()
            if item is not None:
                await self.budget.repay(item.grant)
