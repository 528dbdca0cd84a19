"""asyncio front of the rollout workers: permits, slots, request objects and tasks."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("rollout.srv")


class Busy(Exception):
    pass


class WorkerError(Exception):
    pass


class Permits:
    def __init__(self, n: int) -> None:
        self.n = n
        self.cap = n
        self._ev = asyncio.Event()
        self._ev.set()

    async def obtain(self) -> None:
        while self.n == 0:
            self._ev.clear()
            await self._ev.wait()
        self.n -= 1

    def try_obtain(self) -> bool:
        if self.n == 0:
            return False
        self.n -= 1
        return True

    def yield_back(self) -> None:
        self.n += 1
        self._ev.set()


class SlotTable:
    def __init__(self, n: int) -> None:
        self.free = list(range(n))

    def grab(self) -> Optional[int]:
        return self.free.pop() if self.free else None

    def ungrab(self, s: int) -> None:
        self.free.append(s)


@dataclass
class Request:
    rid: int
    prompt: str
    slot: Optional[int] = None
    has_permit: bool = False
    out: list[str] = field(default_factory=list)
    error: Optional[str] = None


Gen = Callable[[Request], Awaitable[str]]


class Server:
    def __init__(self, permits: Permits, slots: SlotTable, gen: Gen) -> None:
        self.permits = permits
        self.slots = slots
        self.gen = gen
        self.active: dict[int, Request] = {}
        self.waiting: "asyncio.Queue[Request]" = asyncio.Queue()
        self.tasks: set["asyncio.Task[Any]"] = set()

    def _close(self, r: Request) -> None:
        if r.slot is not None:
            self.slots.ungrab(r.slot)
            r.slot = None
        if r.has_permit:
            self.permits.yield_back()
            r.has_permit = False
        self.active.pop(r.rid, None)

    async def handle(self, r: Request) -> str:
        await self.permits.obtain()  # clean: the finally's _close gives it back by the flag
        r.has_permit = True
        try:
            r.slot = self.slots.grab()  # clean: _close ungrabs it
            if r.slot is None:
                raise Busy()
            self.active[r.rid] = r
            return await self.gen(r)
        finally:
            self._close(r)

    async def handle_fast(self, r: Request) -> Optional[str]:
        if not self.permits.try_obtain():  # leak: the no-slot return keeps it
            return None
        slot = self.slots.grab()  # clean: ungrabbed in the finally
        if slot is None:
            r.error = "busy"
            return None
        try:
            return await self.gen(r)
        finally:
            self.slots.ungrab(slot)
            self.permits.yield_back()

    async def handle_retry(self, r: Request, tries: int = 3) -> Optional[str]:
        for i in range(tries):
            slot = self.slots.grab()  # leak: a WorkerError is survived and the next try grabs again
            if slot is None:
                await asyncio.sleep(0)
                continue
            try:
                res = await self.gen(r)
            except WorkerError as e:
                log.warning("try %d: %s", i, e)
                continue
            self.slots.ungrab(slot)
            return res
        return None

    async def handle_retry_held(self, r: Request, tries: int = 3) -> Optional[str]:
        slot = self.slots.grab()  # clean: near miss, one slot through all tries, ungrabbed after the loop
        if slot is None:
            return None
        res = None
        for i in range(tries):
            try:
                res = await self.gen(r)
                break
            except WorkerError as e:
                log.warning("try %d: %s", i, e)
                continue
        self.slots.ungrab(slot)
        return res

    def spawn(self, r: Request) -> bool:
        if not self.permits.try_obtain():  # clean: near miss, the task's done callback gives it back
            return False
        t = asyncio.create_task(self.gen(r))  # type: ignore[arg-type]
        self.tasks.add(t)
        t.add_done_callback(self._task_done)
        return True

    def _task_done(self, t: "asyncio.Task[Any]") -> None:
        self.tasks.discard(t)
        self.permits.yield_back()
        if not t.cancelled() and t.exception() is not None:
            log.error("task: %s", t.exception())

    def spawn_slot(self, r: Request) -> bool:
        slot = self.slots.grab()  # leak: a cancelled task returns from its callback before ungrab
        if slot is None:
            return False
        t = asyncio.create_task(self.gen(r))  # type: ignore[arg-type]
        self.tasks.add(t)

        def done(task: "asyncio.Task[Any]") -> None:
            self.tasks.discard(task)
            if task.cancelled():
                return
            self.slots.ungrab(slot)

        t.add_done_callback(done)
        return True

    def admit(self, r: Request) -> bool:
        """Request owns slot and permit from here; `step` or `cancel` closes it."""
        if r.slot is None:
            r.slot = self.slots.grab()  # clean: moved into the request
        if r.slot is None:
            return False
        if not r.has_permit:
            r.has_permit = self.permits.try_obtain()  # clean: near miss, the flag is in the request and _close reads it
        if not r.has_permit:
            self._close(r)
            return False
        self.active[r.rid] = r
        return True

    async def step(self) -> int:
        n = 0
        for r in list(self.active.values()):
            try:
                r.out.append(await self.gen(r))
            except WorkerError as e:
                r.error = str(e)
            else:
                n += 1
            self._close(r)
        return n

    def cancel(self, rid: int) -> bool:
        r = self.active.get(rid)
        if r is None:
            return False
        self._close(r)
        return True

    def requeue(self, rid: int) -> None:
        r = self.active.pop(rid)
        if r.slot is not None:
            self.slots.ungrab(r.slot)
            r.slot = None
        self.waiting.put_nowait(r)

    async def stream(self, r: Request, n: int) -> AsyncIterator[str]:
        await self.permits.obtain()  # leak: an empty piece ends the generator before yield_back
        for _ in range(n):
            piece = await self.gen(r)
            if not piece:
                return
            yield piece
        self.permits.yield_back()

    async def drain_queue(self) -> int:
        n = 0
        while not self.waiting.empty():
            r = self.waiting.get_nowait()
            if not self.admit(r):
                r.error = "dropped"
                self._close(r)
                continue
            try:
                r.out.append(await self.gen(r))
                n += 1
            finally:
                self._close(r)
        return n


async def _main() -> None:
    async def gen(r: Request) -> str:
        await asyncio.sleep(0)
        return r.prompt.upper()

    s = Server(Permits(4), SlotTable(4), gen)
    print(await s.handle(Request(1, "a")), await s.handle_fast(Request(2, "b")), await s.handle_retry_held(Request(3, "c")))
    s.spawn(Request(4, "d"))
    await asyncio.gather(*s.tasks)
    s.admit(Request(5, "e"))
    await s.step()
    s.admit(Request(6, "f"))
    s.requeue(6)
    print(await s.drain_queue())
    await asyncio.sleep(0)
    print(s.permits.n, len(s.slots.free))


if __name__ == "__main__":
    asyncio.run(_main())
