from __future__ import annotations

import asyncio
from typing import Optional

from .buffers import KVPage, PagePool


class DecodeReceiver:
    """Posts receive pages and hands them to the decode loop when the transfer is done."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pending: dict[str, list[KVPage]] = {}
        self.posted_at: dict[str, float] = {}
        self.arrived: "asyncio.Queue[tuple[str, list[KVPage]]]" = asyncio.Queue()
        self.probes: dict[str, KVPage] = {}
        self._tasks: set["asyncio.Task[None]"] = set()

    def post(self, rid: str, n: int, now: float) -> bool:
        if rid in self.pending:
            return True
        pages = self.pool.get_pages(n)  # clean: near miss, kept under a free key; on_complete queues it, expire puts it back
        if pages is None:
            return False
        self.pending[rid] = pages
        self.posted_at[rid] = now
        return True

    def on_complete(self, rid: str) -> None:
        pages = self.pending.pop(rid, None)
        if pages is None:
            return
        self.posted_at.pop(rid, None)
        self.arrived.put_nowait((rid, pages))

    def expire(self, now: float, ttl: float) -> int:
        late = [r for r, t in self.posted_at.items() if now - t > ttl]
        for rid in late:
            del self.posted_at[rid]
            self.pool.put_pages(self.pending.pop(rid))
        return len(late)

    async def consume(self) -> bytes:
        rid, pages = await self.arrived.get()
        try:
            return b"".join(bytes(p.data) for p in pages)
        finally:
            self.pool.put_pages(pages)

    def post_probe(self, rid: str) -> bool:
        page = self.pool.get_page()  # leak: clear_probes empties the dict without put_page
        if page is None:
            return False
        old = self.probes.pop(rid, None)
        if old is not None:
            self.pool.put_page(old)
        self.probes[rid] = page
        return True

    def clear_probes(self) -> int:
        n = len(self.probes)
        self.probes.clear()
        return n

    async def _receive(self, page: KVPage, done: "asyncio.Future[bytes]") -> None:
        try:
            done.set_result(await asyncio.wait_for(self._read(page), 0.05))
        except asyncio.TimeoutError:
            done.set_result(b"")
        finally:
            self.pool.put_page(page)

    async def _read(self, page: KVPage) -> bytes:
        await asyncio.sleep(0)
        return bytes(page.data)

    async def receive_one(self) -> Optional[bytes]:
        page = self.pool.get_page()  # clean: near miss, the task that gets it puts it back in finally
        if page is None:
            return None
        done: "asyncio.Future[bytes]" = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._receive(page, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await done

    async def receive_within(self, timeout: float) -> Optional[bytes]:
        page = self.pool.get_page()  # leak: the caught timeout returns None with the page out
        if page is None:
            return None
        try:
            data = await asyncio.wait_for(self._read(page), timeout)
        except asyncio.TimeoutError:
            return None
        self.pool.put_page(page)
        return data
