"""Async front door: per-tenant permits, streaming, hedged calls."""
from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("gateway")


class Overloaded(Exception):
    pass


class Permit:
    __slots__ = ("tenant", "serial")

    def __init__(self, tenant: str, serial: int) -> None:
        self.tenant = tenant
        self.serial = serial


class PermitDesk:
    def __init__(self, limit: int) -> None:
        self._left = limit
        self._serial = 0
        self._changed = asyncio.Condition()

    async def obtain(self, tenant: str) -> Permit:
        async with self._changed:
            while self._left == 0:
                await self._changed.wait()
            self._left -= 1
            self._serial += 1
            return Permit(tenant, self._serial)

    def obtain_nowait(self, tenant: str) -> Optional[Permit]:
        if self._left == 0:
            return None
        self._left -= 1
        self._serial += 1
        return Permit(tenant, self._serial)

    async def relinquish(self, permit: Permit) -> None:
        async with self._changed:
            self._left += 1
            self._changed.notify()

    @contextlib.asynccontextmanager
    async def seat(self, tenant: str) -> AsyncIterator[Permit]:
        p = await self.obtain(tenant)  # clean: finally
        try:
            yield p
        finally:
            await self.relinquish(p)

    @property
    def left(self) -> int:
        return self._left


@dataclass
class Call:
    tenant: str
    body: Dict[str, Any]
    permit: Optional[Permit] = None
    stream: bool = False


Backend = Callable[[Dict[str, Any]], Awaitable[Any]]


class Gateway:
    def __init__(self, desk: PermitDesk, backend: Backend, *, timeout: float = 5.0) -> None:
        self.desk = desk
        self.backend = backend
        self.timeout = timeout
        self._queue: "asyncio.Queue[Call]" = asyncio.Queue()
        self._by_id: Dict[int, Permit] = {}
        self._tasks: set = set()

    async def handle(self, call: Call) -> Any:
        async with self.desk.seat(call.tenant):  # clean: async with
            return await self.backend(call.body)

    async def handle_bounded(self, call: Call) -> Optional[Any]:
        permit = await self.desk.obtain(call.tenant)  # leak: a timeout is caught and returns without relinquish
        try:
            out = await asyncio.wait_for(self.backend(call.body), self.timeout)
        except asyncio.TimeoutError:
            log.info("timeout for %s", call.tenant)
            return None
        await self.desk.relinquish(permit)
        return out

    async def handle_or_reject(self, call: Call) -> Any:
        permit = self.desk.obtain_nowait(call.tenant)  # clean: None raises before anything is held, else finally
        if permit is None:
            raise Overloaded(call.tenant)
        try:
            return await self.backend(call.body)
        finally:
            await self.desk.relinquish(permit)

    async def retrying(self, call: Call, attempts: int = 3) -> Any:
        last: Optional[Exception] = None
        for n in range(attempts):
            permit = await self.desk.obtain(call.tenant)  # leak: a failed attempt goes round without relinquish
            try:
                out = await self.backend(call.body)
            except ConnectionError as e:
                last = e
                await asyncio.sleep(0.01 * 2 ** n)
                continue
            await self.desk.relinquish(permit)
            return out
        raise last if last else Overloaded(call.tenant)

    async def retrying_inside(self, call: Call, attempts: int = 3) -> Any:
        permit = await self.desk.obtain(call.tenant)  # clean: near miss, one permit over all attempts, finally
        try:
            for n in range(attempts):
                try:
                    return await self.backend(call.body)
                except ConnectionError:
                    if n + 1 == attempts:
                        raise
                    await asyncio.sleep(0.01 * 2 ** n)
        finally:
            await self.desk.relinquish(permit)

    # -- queue and tasks -----------------------------------------------------
    async def enqueue(self, call: Call) -> bool:
        call.permit = self.desk.obtain_nowait(call.tenant)  # clean: moved in the queued call, worker gives back
        if call.permit is None:
            return False
        await self._queue.put(call)
        return True

    async def enqueue_validated(self, call: Call) -> bool:
        call.permit = await self.desk.obtain(call.tenant)  # leak: a bad body is refused and the permit goes with the dropped call
        if "prompt" not in call.body:
            return False
        await self._queue.put(call)
        return True

    async def worker(self) -> None:
        while True:
            call = await self._queue.get()
            try:
                await self.backend(call.body)
            except Exception:
                log.exception("backend")
            finally:
                if call.permit is not None:
                    await self.desk.relinquish(call.permit)
                self._queue.task_done()

    async def spawn(self, call: Call) -> asyncio.Task:
        permit = await self.desk.obtain(call.tenant)  # clean: near miss, the task gives it back
        task = asyncio.create_task(self._run_with(permit, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_with(self, permit: Permit, call: Call) -> Any:
        try:
            return await self.backend(call.body)
        finally:
            await self.desk.relinquish(permit)

    async def open_stream(self, call_id: int, tenant: str) -> None:
        permit = await self.desk.obtain(tenant)  # clean: kept by id until close_stream
        old = self._by_id.pop(call_id, None)
        self._by_id[call_id] = permit
        if old is not None:
            await self.desk.relinquish(old)

    async def close_stream(self, call_id: int) -> None:
        permit = self._by_id.pop(call_id, None)
        if permit is not None:
            await self.desk.relinquish(permit)

    async def abort_all(self, ids: List[int]) -> int:
        n = 0
        for i in ids:
            if i in self._by_id:
                await self.close_stream(i)
                n += 1
        return n

    async def tokens(self, call: Call, n: int) -> AsyncIterator[Any]:
        permit = await self.desk.obtain(call.tenant)  # leak: an empty piece ends the generator before relinquish
        for i in range(n):
            piece = await self.backend({"i": i, **call.body})
            if not piece:
                return
            yield piece
        await self.desk.relinquish(permit)

    async def hedged(self, call: Call) -> Any:
        """Second attempt on another replica when the first is slow."""
        first = await self.spawn(call)  # clean: the task gives its permit back
        done, _ = await asyncio.wait({first}, timeout=self.timeout / 10)
        if done:
            return first.result()
        spare = self.desk.obtain_nowait(call.tenant)  # clean: near miss, given to the second task or None
        if spare is None:
            return await first
        second = asyncio.create_task(self._run_with(spare, call))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for t in pending:
            t.cancel()
        return done.pop().result()

    async def capacity(self, tenant: str, want: int) -> int:
        """How many calls could start now."""
        got = 0
        while got < want and self.desk.obtain_nowait(tenant) is not None:  # leak: permits are counted and forgotten
            got += 1
        return got

    async def batch(self, calls: List[Call]) -> List[Any]:
        permits = [await self.desk.obtain(c.tenant) for c in calls]  # clean: near miss, the list is emptied in finally
        try:
            return await asyncio.gather(*(self.backend(c.body) for c in calls))
        finally:
            for p in permits:
                await self.desk.relinquish(p)
