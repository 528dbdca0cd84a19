"""Asyncio front end that stages remote shards for the trainers of one node."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional, Set

import torch

log = logging.getLogger("stager")


@dataclass(eq=False)
class Slab:
    ident: int
    data: torch.Tensor
    length: int = 0


class SlabPool:
    def __init__(self, n: int, nbytes: int):
        self._free: "asyncio.Queue[Slab]" = asyncio.Queue()
        for i in range(n):
            self._free.put_nowait(Slab(i, torch.empty(nbytes, dtype=torch.uint8)))

    async def claim(self) -> Slab:
        return await self._free.get()  # clean: returned

    def claim_nowait(self) -> Optional[Slab]:
        if self._free.empty():
            return None
        return self._free.get_nowait()  # clean: returned

    def unclaim(self, slab: Slab) -> None:
        slab.length = 0
        self._free.put_nowait(slab)


@dataclass
class StageRequest:
    key: str
    slab: Optional[Slab] = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0


class Stager:
    def __init__(self, pool: SlabPool, client, parallel: int = 4):
        self.pool = pool
        self.client = client
        self.gate = asyncio.Semaphore(parallel)
        self.table: Dict[str, StageRequest] = {}
        self.tasks: Set[asyncio.Task] = set()

    async def _download(self, req: StageRequest) -> None:
        async with self.gate:  # clean: with block
            slab = await self.pool.claim()  # clean: near miss, moves into the request, which drop() or close() empties
            slab.length = await self.client.read_into(req.key, slab.data)
            req.slab = slab
            req.ready.set()

    def request(self, key: str) -> StageRequest:
        req = self.table.get(key)
        if req is None:
            req = self.table[key] = StageRequest(key)
            task = asyncio.ensure_future(self._download(req))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        req.users += 1
        return req

    def drop(self, req: StageRequest) -> None:
        req.users -= 1
        if req.users == 0 and req.slab is not None:
            self.table.pop(req.key, None)
            self.pool.unclaim(req.slab)
            req.slab = None

    async def close(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for req in self.table.values():
            if req.slab is not None:
                self.pool.unclaim(req.slab)
                req.slab = None
        self.table.clear()

    async def fetch_now(self, key: str, attempts: int = 3) -> Optional[bytes]:
        """Download outside the table, with retries for short reads."""
        for attempt in range(attempts):
            slab = await self.pool.claim()  # leak: a short read starts the next attempt with this slab still claimed
            want = await self.client.size(key)
            slab.length = await self.client.read_into(key, slab.data)
            if slab.length < want:
                log.info("short read of %s (%d/%d), attempt %d", key, slab.length, want, attempt)
                continue
            blob = bytes(slab.data[: slab.length].numpy())
            self.pool.unclaim(slab)
            return blob
        return None

    async def fetch_or_none(self, key: str, attempts: int = 3) -> Optional[Slab]:
        slab = await self.pool.claim()  # clean: near miss, one slab for all attempts, returned or unclaimed after the last
        for _ in range(attempts):
            slab.length = await self.client.read_into(key, slab.data)
            if slab.length:
                return slab
            await asyncio.sleep(0.1)
        self.pool.unclaim(slab)
        return None

    async def checksum(self, key: str) -> int:
        slab = await self.fetch_or_none(key)  # leak: the sum is returned, the slab is not unclaimed
        if slab is None:
            return 0
        return int(slab.data[: slab.length].sum().item())

    async def replace(self, key: str) -> bool:
        """Re-download a shard whose contents changed upstream."""
        req = self.table.get(key)
        if req is None or not req.ready.is_set():
            return False
        slab = await self.fetch_or_none(key)  # leak: req.slab is overwritten with the old one still claimed
        if slab is None:
            return False
        req.slab = slab
        req.ready.set()
        return True

    async def swap_in(self, key: str) -> bool:
        req = self.table.get(key)
        if req is None or not req.ready.is_set():
            return False
        slab = await self.fetch_or_none(key)  # clean: near miss, the old slab is unclaimed when the new one goes in
        if slab is None:
            return False
        old, req.slab = req.slab, slab
        if old is not None:
            self.pool.unclaim(old)
        return True

    def peek(self, key: str, header: int) -> Optional[torch.Tensor]:
        slab = self.pool.claim_nowait()  # leak: the return for small files comes after the claim and before the unclaim
        if slab is None:
            return None
        n = self.client.peek_into(key, slab.data)
        if n < header:
            return None
        head = slab.data[:header].clone()
        self.pool.unclaim(slab)
        return head


async def stream(stager: Stager, keys: List[str]) -> AsyncIterator[Slab]:
    """Slabs in order, each valid until the next one is asked for."""
    for key in keys:
        slab = await stager.fetch_or_none(key)  # clean: near miss, the finally unclaims after each yield
        if slab is None:
            continue
        try:
            yield slab
        finally:
            stager.pool.unclaim(slab)


async def warm(stager: Stager, keys: List[str], limit: int) -> int:
    slabs: List[Slab] = []
    for key in keys:
        slab = await stager.fetch_or_none(key)  # leak: when the limit is reached the list is abandoned by the return
        if slab is None:
            continue
        slabs.append(slab)
        if len(slabs) == limit:
            return limit
    for slab in slabs:
        stager.pool.unclaim(slab)
    return len(slabs)
