"""Servicer with interceptors: every call holds a CallSlot and, for generation, a sequence id."""
import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional, Protocol

logger = logging.getLogger("rpc")


class StatusCode:
    OK = 0
    INVALID = 3
    EXHAUSTED = 8


class AbortError(Exception):
    def __init__(self, code: int, msg: str = "") -> None:
        super().__init__(msg)
        self.code = code


class Context(Protocol):
    def deadline(self) -> float: ...
    def cancelled(self) -> bool: ...


class SequenceIds:
    def __init__(self, limit: int) -> None:
        self._heap: List[int] = list(range(limit, 0, -1))

    async def obtain_id(self) -> Optional[int]:
        await asyncio.sleep(0)
        return self._heap.pop() if self._heap else None  # clean: handed out

    def retire_id(self, sid: int) -> None:
        self._heap.append(sid)


class CallSlots:
    def __init__(self, n: int) -> None:
        self._sem = asyncio.Semaphore(n)
        self.entered: Dict[str, int] = {}

    async def enter(self, method: str) -> None:
        await self._sem.acquire()  # clean: leave() releases the semaphore
        self.entered[method] = self.entered.get(method, 0) + 1

    def leave(self, method: str) -> None:
        self.entered[method] -= 1
        self._sem.release()

    @asynccontextmanager
    async def call(self, method: str) -> AsyncIterator[None]:
        await self.enter(method)  # clean: finally
        try:
            yield
        finally:
            self.leave(method)


Handler = Callable[[Any, Context], Awaitable[Any]]


class Servicer:
    def __init__(self, slots: CallSlots, ids: SequenceIds, engine: Any) -> None:
        self.slots = slots
        self.ids = ids
        self.engine = engine
        self.open_streams: Dict[str, int] = {}

    def intercept(self, name: str, handler: Handler) -> Handler:
        async def wrapped(req: Any, ctx: Context) -> Any:
            await self.slots.enter(name)  # clean: near miss, the AbortError is raised again through the finally
            try:
                return await handler(req, ctx)
            except AbortError as exc:
                logger.info("%s aborted: %d", name, exc.code)
                raise
            finally:
                self.slots.leave(name)

        return wrapped

    def intercept_old(self, name: str, handler: Handler) -> Handler:
        async def wrapped(req: Any, ctx: Context) -> Any:
            await self.slots.enter(name)  # leak: a cancelled call answers None without leave
            if ctx.cancelled():
                return None
            res = await handler(req, ctx)
            self.slots.leave(name)
            return res

        return wrapped

    async def Generate(self, req: Dict[str, Any], ctx: Context) -> List[str]:
        async with self.slots.call("Generate"):  # clean: async with
            sid = await self.ids.obtain_id()  # clean: near miss, None aborts, everything else reaches the finally
            if sid is None:
                raise AbortError(StatusCode.EXHAUSTED)
            try:
                if not req.get("prompt"):
                    raise AbortError(StatusCode.INVALID, "prompt")
                return [tok async for tok in self.engine.run(sid, req["prompt"])]
            finally:
                self.ids.retire_id(sid)

    async def Score(self, req: Dict[str, Any], ctx: Context) -> float:
        sid = await self.ids.obtain_id()  # leak: an empty prompt aborts after the id was obtained
        if sid is None:
            raise AbortError(StatusCode.EXHAUSTED)
        if not req.get("prompt"):
            raise AbortError(StatusCode.INVALID, "prompt")
        value = await self.engine.score(sid, req["prompt"])
        self.ids.retire_id(sid)
        return value

    async def Stream(self, req: Dict[str, Any], ctx: Context) -> AsyncIterator[str]:
        sid = await self.ids.obtain_id()  # leak: past the deadline the stream returns before retire_id
        if sid is None:
            return
        async for tok in self.engine.run(sid, req["prompt"]):
            if time.monotonic() > ctx.deadline():
                return
            yield tok
        self.ids.retire_id(sid)

    async def StreamBounded(self, req: Dict[str, Any], ctx: Context) -> AsyncIterator[str]:
        sid = await self.ids.obtain_id()  # clean: near miss, break goes on to retire_id
        if sid is None:
            return
        async for tok in self.engine.run(sid, req["prompt"]):
            if time.monotonic() > ctx.deadline():
                break
            yield tok
        self.ids.retire_id(sid)

    async def OpenStream(self, key: str) -> bool:
        if key in self.open_streams:
            return False
        sid = await self.ids.obtain_id()  # clean: near miss, retired when the key came up meanwhile, else in the table that CloseStream empties
        if sid is None:
            return False
        if key in self.open_streams:
            self.ids.retire_id(sid)
            return False
        self.open_streams[key] = sid
        return True

    async def CloseStream(self, key: str) -> None:
        sid = self.open_streams.pop(key, None)
        if sid is not None:
            self.ids.retire_id(sid)

    async def BestOf(self, req: Dict[str, Any], n: int) -> Optional[str]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.slots.call("BestOf"))  # clean: exit stack
            sids: List[int] = []
            for _ in range(n):
                sid = await self.ids.obtain_id()  # clean: near miss, the stack's callback retires it on every way out
                if sid is None:
                    return None
                stack.callback(self.ids.retire_id, sid)
                sids.append(sid)
            results = await asyncio.gather(*(self.engine.best(s, req) for s in sids))
            return max(results, key=len)

    async def Fork(self, req: Dict[str, Any], n: int) -> List[Any]:
        sids = [await self.ids.obtain_id() for _ in range(n)]  # leak: if one is None the AbortError loses the others
        if any(s is None for s in sids):
            raise AbortError(StatusCode.EXHAUSTED)
        out = await asyncio.gather(*(self.engine.best(s, req) for s in sids))
        for s in sids:
            self.ids.retire_id(s)
        return out

    async def Ping(self, req: Any, ctx: Context) -> int:
        await self.slots.enter("Ping")  # leak: no path calls leave
        return StatusCode.OK
