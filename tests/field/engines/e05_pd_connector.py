"""Decode-side connector: pulls KV pages from prefill workers."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)


class Transport(Protocol):
    async def read(self, remote: str, pages: list[int]) -> bool: ...

    async def notify(self, remote: str, req_id: str) -> None: ...


@dataclass
class PullSpec:
    req_id: str
    remote: str
    num_pages: int


@dataclass
class Reservation:
    pages: list[int]


class PageReserve:
    """Landing pages in decode memory. ``reserve`` waits until enough are free."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._cond = asyncio.Condition()

    async def reserve(self, n: int) -> Reservation:
        async with self._cond:
            await self._cond.wait_for(lambda: len(self._free) >= n)
            pages = [self._free.pop() for _ in range(n)]  # clean: wrapped and returned
            return Reservation(pages)

    def reserve_nowait(self, n: int) -> Reservation | None:
        if len(self._free) < n:
            return None
        pages, self._free = self._free[:n], self._free[n:]  # clean: wrapped and returned
        return Reservation(pages)

    async def unreserve(self, r: Reservation) -> None:
        async with self._cond:
            self._free.extend(r.pages)
            r.pages = []
            self._cond.notify_all()


class PullConnector:
    """Starts one task per request and keeps what landed until it is claimed."""

    def __init__(self, reserve: PageReserve, transport: Transport, max_retries: int = 3) -> None:
        self.reserve_pool = reserve
        self.transport = transport
        self.max_retries = max_retries
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._landed: dict[str, Reservation] = {}
        self._prefetched: dict[str, Reservation] = {}

    def start(self, spec: PullSpec) -> None:
        if spec.req_id not in self._tasks and spec.req_id not in self._landed:
            self._tasks[spec.req_id] = asyncio.create_task(self._pull(spec))

    async def _pull(self, spec: PullSpec) -> bool:
        r = await self.reserve_pool.reserve(spec.num_pages)  # clean: landed table on success, unreserved otherwise
        try:
            ok = await self.transport.read(spec.remote, r.pages)
        except BaseException:
            await self.reserve_pool.unreserve(r)
            raise
        if not ok:
            await self.reserve_pool.unreserve(r)
            return False
        self._landed[spec.req_id] = r
        return True

    async def pull_with_retry(self, spec: PullSpec) -> list[int] | None:
        """Pull at once, with fresh pages for each attempt."""
        for attempt in range(self.max_retries):
            r = await self.reserve_pool.reserve(spec.num_pages)  # leak: a failed attempt goes round and reserves anew
            try:
                if await self.transport.read(spec.remote, r.pages):
                    self._landed[spec.req_id] = r
                    return r.pages
            except ConnectionError:
                logger.warning("attempt %d for %s failed", attempt, spec.req_id)
            await asyncio.sleep(0.01 * 2**attempt)
        return None

    async def pull_same_pages(self, spec: PullSpec) -> list[int] | None:
        """Pull at once, trying again into the same pages."""
        if spec.req_id in self._landed:
            return self._landed[spec.req_id].pages
        r = await self.reserve_pool.reserve(spec.num_pages)  # clean: near miss, after the last attempt the else branch unreserves
        for attempt in range(self.max_retries):
            try:
                if await self.transport.read(spec.remote, r.pages):
                    break
            except ConnectionError:
                logger.warning("attempt %d for %s failed", attempt, spec.req_id)
                continue
        else:
            await self.reserve_pool.unreserve(r)
            return None
        self._landed[spec.req_id] = r
        return r.pages

    def prefetch(self, spec: PullSpec) -> bool:
        """Set pages aside for a request that the router announced."""
        if spec.req_id in self._prefetched:
            return True
        r = self.reserve_pool.reserve_nowait(spec.num_pages)  # leak: no cleanup looks at the prefetched table
        if r is None:
            return False
        self._prefetched[spec.req_id] = r
        return True

    async def claim(self, req_id: str) -> list[int]:
        task = self._tasks.pop(req_id)
        if not await task:
            return []
        return self._landed[req_id].pages

    async def release(self, req_id: str) -> None:
        """Called when the decode of ``req_id`` ended."""
        r = self._landed.pop(req_id, None)
        if r is not None:
            await self.reserve_pool.unreserve(r)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        for req_id in list(self._landed):
            await self.release(req_id)


class HealthProbe:
    """Round-trips one page to each prefill worker."""

    def __init__(self, reserve: PageReserve, transport: Transport) -> None:
        self.reserve_pool = reserve
        self.transport = transport

    async def probe(self, remotes: list[str], timeout: float = 1.0) -> dict[str, bool]:
        alive: dict[str, bool] = {}
        for remote in remotes:
            r = await self.reserve_pool.reserve(1)  # leak: the timeout handler continues without unreserving
            try:
                alive[remote] = await asyncio.wait_for(self.transport.read(remote, r.pages), timeout)
            except asyncio.TimeoutError:
                alive[remote] = False
                continue
            await self.reserve_pool.unreserve(r)
        return alive

    async def latency(self, remote: str) -> float:
        r = await self.reserve_pool.reserve(1)  # leak: the unreserve coroutine is never awaited
        loop = asyncio.get_running_loop()
        began = loop.time()
        ok = await self.transport.read(remote, r.pages)
        took = loop.time() - began
        self.reserve_pool.unreserve(r)
        return took if ok else float("inf")

    async def probe_one(self, remote: str) -> bool:
        r = self.reserve_pool.reserve_nowait(1)  # clean: near miss, the returns in body and handler both pass the finally
        if r is None:
            return True
        try:
            return await self.transport.read(remote, r.pages)
        except ConnectionError:
            return False
        finally:
            await self.reserve_pool.unreserve(r)
