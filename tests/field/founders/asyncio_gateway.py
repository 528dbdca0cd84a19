"""Asyncio gateway in front of model replicas: connection leases, admission permits."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Dict, List, Optional


class Upstream:
    def __init__(self, cid: int) -> None:
        self.cid = cid
        self.healthy = True

    async def call(self, prompt: str) -> str:
        await asyncio.sleep(0)
        if prompt == "boom":
            raise ConnectionError(self.cid)
        return prompt.upper()


class UpstreamPool:
    def __init__(self, size: int) -> None:
        self._q: "asyncio.Queue[Upstream]" = asyncio.Queue()
        for i in range(size):
            self._q.put_nowait(Upstream(i))

    async def checkout(self) -> Upstream:
        return await self._q.get()

    def checkout_nowait(self) -> Optional[Upstream]:
        try:
            return self._q.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def checkin(self, up: Upstream) -> None:
        self._q.put_nowait(up)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Upstream]:
        up = await self.checkout()  # clean: checked in by the finally
        try:
            yield up
        finally:
            self.checkin(up)


class Stream:
    """One open generation; `aclose` returns its upstream."""

    def __init__(self, pool: UpstreamPool, up: Upstream, rid: str) -> None:
        self.pool = pool
        self.up: Optional[Upstream] = up
        self.rid = rid

    async def aclose(self) -> None:
        if self.up is not None:
            up, self.up = self.up, None
            self.pool.checkin(up)


class Gateway:
    def __init__(self, pool: UpstreamPool, limit: int) -> None:
        self.pool = pool
        self.permits = asyncio.Semaphore(limit)
        self.streams: Dict[str, Stream] = {}
        self.tasks: List[asyncio.Task] = []

    async def complete(self, prompt: str) -> str:
        async with self.pool.session() as up:  # clean: async with
            return await up.call(prompt)

    async def complete_safe(self, prompt: str) -> Optional[str]:
        up = await self.pool.checkout()  # leak: ConnectionError is answered with None before checkin
        try:
            text = await up.call(prompt)
        except ConnectionError:
            return None
        self.pool.checkin(up)
        return text

    async def admit(self, prompt: str) -> str:
        await self.permits.acquire()  # clean: released in finally
        try:
            return await self.complete(prompt)
        finally:
            self.permits.release()

    async def admit_long(self, prompt: str, max_len: int) -> str:
        await self.permits.acquire()  # leak: a prompt that is too long is refused with the permit held
        if len(prompt) > max_len:
            return "413"
        try:
            return await self.complete(prompt)
        finally:
            self.permits.release()

    async def failover(self, prompt: str, tries: int = 3) -> Optional[str]:
        up = await self.pool.checkout()  # leak: the unhealthy one is rebound on the next try
        for _ in range(tries):
            if up.healthy:
                break
            up = await self.pool.checkout()  # leak: rebound again while unhealthy, loses its predecessor
        try:
            return await up.call(prompt)
        finally:
            self.pool.checkin(up)

    async def failover_swap(self, prompt: str, tries: int = 3) -> Optional[str]:
        up = await self.pool.checkout()  # clean: near miss, checked in before the rebinding
        try:
            for _ in range(tries):
                if up.healthy:
                    break
                nxt = self.pool.checkout_nowait()  # clean: near miss, replaces up after up is checked in
                if nxt is None:
                    break
                self.pool.checkin(up)
                up = nxt
            return await up.call(prompt)
        finally:
            self.pool.checkin(up)

    async def open_stream(self, rid: str) -> Stream:
        up = await self.pool.checkout()  # clean: moved into the stream, entered in the table
        st = Stream(self.pool, up, rid)
        prev = self.streams.pop(rid, None)
        if prev is not None:
            await prev.aclose()
        self.streams[rid] = st
        return st

    async def attach(self, rid: str) -> bool:
        up = self.pool.checkout_nowait()  # leak: a known rid returns False, fresh upstream dropped
        if up is None:
            return False
        if rid in self.streams:
            return False
        self.streams[rid] = Stream(self.pool, up, rid)
        return True

    async def cancel(self, rid: str) -> None:
        st = self.streams.pop(rid, None)
        if st is None:
            return
        await st.aclose()

    def spawn(self, prompt: str) -> bool:
        up = self.pool.checkout_nowait()  # clean: near miss, the task's done callback checks it in
        if up is None:
            return False
        task = asyncio.ensure_future(up.call(prompt))
        task.add_done_callback(lambda _t, u=up: self.pool.checkin(u))
        self.tasks.append(task)
        return True

    def spawn_background(self, prompt: str) -> Optional[asyncio.Task]:
        up = self.pool.checkout_nowait()  # clean: near miss, the coroutine run by the task checks it in
        if up is None:
            return None
        return asyncio.ensure_future(self._serve(up, prompt))

    async def _serve(self, up: Upstream, prompt: str) -> str:
        try:
            return await up.call(prompt)
        finally:
            self.pool.checkin(up)

    def spawn_probe(self, prompt: str) -> Optional[asyncio.Task]:
        up = self.pool.checkout_nowait()  # leak: the probe coroutine never checks in
        if up is None:
            return None
        return asyncio.ensure_future(self._probe(up, prompt))

    async def _probe(self, up: Upstream, prompt: str) -> bool:
        try:
            await up.call(prompt)
        except ConnectionError:
            up.healthy = False
        return up.healthy

    async def fan_out(self, prompts: List[str]) -> List[str]:
        ups = []
        for _ in prompts:
            ups.append(await self.pool.checkout())  # clean: all checked in by the finally
        try:
            return list(await asyncio.gather(*(u.call(p) for u, p in zip(ups, prompts))))
        finally:
            for u in ups:
                self.pool.checkin(u)

    async def shutdown(self) -> None:
        for st in self.streams.values():
            await st.aclose()
        self.streams.clear()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def _demo() -> None:
    gw = Gateway(UpstreamPool(6), 2)
    assert await gw.admit("a") == "A"
    assert await gw.complete_safe("b") == "B"
    assert await gw.failover_swap("c") == "C"
    await gw.open_stream("r1")  # clean: near miss, kept in the table and cancelled by rid
    await gw.cancel("r1")
    assert await gw.attach("r2")
    gw.spawn("d")
    task = gw.spawn_background("e")  # clean: awaited, its coroutine checks in
    if task:
        await task
    assert await gw.fan_out(["x", "y"]) == ["X", "Y"]
    await gw.shutdown()


if __name__ == "__main__":
    asyncio.run(_demo())
