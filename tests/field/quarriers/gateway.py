"""Async front end: upstream connections and response buffers under a concurrency cap."""
from __future__ import annotations

import asyncio
import logging
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger(__name__)


class UpstreamError(RuntimeError):
    pass


class Lease:
    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.tokens = 0


class BackendLeases:
    def __init__(self, backends: list[str], per_backend: int) -> None:
        self._room = {b: per_backend for b in backends}
        self._cond = asyncio.Condition()

    async def lease(self, timeout: Optional[float] = None) -> Lease:
        async with self._cond:  # clean: async with
            await asyncio.wait_for(self._cond.wait_for(lambda: any(self._room.values())), timeout)
            backend = max(self._room, key=self._room.__getitem__)
            self._room[backend] -= 1
            return Lease(backend)

    async def surrender(self, lease: Lease) -> None:
        async with self._cond:  # clean: async with
            self._room[lease.backend] += 1
            self._cond.notify()

    def room(self) -> int:
        return sum(self._room.values())


class Gateway:
    def __init__(self, leases: BackendLeases, call: Callable[[str, str], Awaitable[str]], streams: int = 8) -> None:
        self.leases = leases
        self.call = call
        self.permits = asyncio.Semaphore(streams)
        self._sticky: dict[str, Lease] = {}
        self._tasks: set[asyncio.Task] = set()
        self._ready: asyncio.Queue[Lease] = asyncio.Queue()

    async def complete(self, prompt: str) -> str:
        lease = await self.leases.lease()  # clean: finally
        try:
            return await self.call(lease.backend, prompt)
        finally:
            await self.leases.surrender(lease)

    async def complete_or_none(self, prompt: str) -> Optional[str]:
        lease = await self.leases.lease()  # leak: an UpstreamError is turned into None without surrender
        try:
            text = await self.call(lease.backend, prompt)
        except UpstreamError as e:
            log.warning("%s: %s", lease.backend, e)
            return None
        await self.leases.surrender(lease)
        return text

    async def hedge(self, prompt: str) -> str:
        """Retry elsewhere after a failure."""
        lease = await self.leases.lease()  # clean: near miss, surrendered before lease is rebound
        try:
            for _ in range(2):
                try:
                    return await self.call(lease.backend, prompt)
                except UpstreamError:
                    await self.leases.surrender(lease)
                    lease = await self.leases.lease()  # clean: near miss, outer finally surrenders the last one
            return await self.call(lease.backend, prompt)
        finally:
            await self.leases.surrender(lease)

    async def hedge_fast(self, prompt: str) -> Optional[str]:
        lease = await self.leases.lease()  # leak: rebound in the handler without surrender
        try:
            text = await self.call(lease.backend, prompt)
        except UpstreamError:
            lease = await self.leases.lease()  # clean: surrendered in the finally below
            text = None
        try:
            if text is None:
                text = await self.call(lease.backend, prompt)
        finally:
            await self.leases.surrender(lease)
        return text

    async def stream(self, prompt: str, chunks: Callable[[str, str], AsyncIterator[str]]) -> AsyncIterator[str]:
        await self.permits.acquire()  # leak: an end marker returns before release
        lease = await self.leases.lease()  # clean: inner finally
        try:
            async for chunk in chunks(lease.backend, prompt):
                lease.tokens += 1
                if chunk == "[DONE]":
                    return
                yield chunk
        finally:
            await self.leases.surrender(lease)
        self.permits.release()

    def submit(self, prompt: str, deliver: Callable[[str], None]) -> None:
        task = asyncio.ensure_future(self._deliver(prompt, deliver))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, prompt: str, deliver: Callable[[str], None]) -> None:
        async with self.permits:  # clean: async with
            deliver(await self.complete(prompt))

    async def spawn(self, prompt: str) -> asyncio.Task:
        """The permit is taken here, so that the caller feels the back pressure, and returned by the task's callback."""
        await self.permits.acquire()  # clean: near miss, the done callback releases it
        task = asyncio.ensure_future(self.complete(prompt))
        task.add_done_callback(lambda _t: self.permits.release())
        return task

    async def spawn_unless(self, prompt: str, stop: asyncio.Event) -> Optional[asyncio.Task]:
        await self.permits.acquire()  # leak: stop set while waiting returns with the permit
        if stop.is_set():
            return None
        task = asyncio.ensure_future(self.complete(prompt))
        task.add_done_callback(lambda _t: self.permits.release())
        return task

    async def bind_session(self, session: str) -> str:
        lease = await self.leases.lease()  # clean: near miss, the displaced lease is surrendered
        old = self._sticky.pop(session, None)
        self._sticky[session] = lease
        if old is not None:
            await self.leases.surrender(old)
        return lease.backend

    async def end_session(self, session: str) -> None:
        lease = self._sticky.pop(session, None)
        if lease is not None:
            await self.leases.surrender(lease)

    async def prefill_ready(self, n: int) -> None:
        for _ in range(n):
            lease = await self.leases.lease()  # clean: queued, drain_ready surrenders
            await self._ready.put(lease)

    async def drain_ready(self) -> None:
        while not self._ready.empty():
            await self.leases.surrender(self._ready.get_nowait())

    async def health(self) -> dict[str, bool]:
        seen: dict[str, bool] = {}
        for _ in range(self.leases.room()):
            lease = await self.leases.lease()  # leak: a backend seen before is skipped without surrender
            if lease.backend in seen:
                continue
            try:
                seen[lease.backend] = bool(await self.call(lease.backend, "ping"))
            except UpstreamError:
                seen[lease.backend] = False
            await self.leases.surrender(lease)
        return seen


if __name__ == "__main__":

    async def main() -> None:
        async def call(backend: str, prompt: str) -> str:
            return backend + prompt

        leases = BackendLeases(["a", "b"], 2)
        gw = Gateway(leases, call)
        assert await gw.hedge("x") in ("ax", "bx")
        await (await gw.spawn("y"))
        await gw.bind_session("s")
        await gw.bind_session("s")
        await gw.end_session("s")
        await gw.prefill_ready(2)
        await gw.drain_ready()
        assert leases.room() == 4

    asyncio.run(main())
