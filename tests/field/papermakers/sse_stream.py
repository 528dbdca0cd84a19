"""Server-sent event streaming of completions.

Each open stream owns a mailbox from the hub and a permit of the connection
limiter; detokenizer states are borrowed per choice.
"""
from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator

log = logging.getLogger("http.stream")

SENTINEL = object()


class Mailbox:
    def __init__(self, num: int):
        self.num = num
        self.q: asyncio.Queue = asyncio.Queue()
        self.rid: str | None = None

    def clear(self) -> None:
        while not self.q.empty():
            self.q.get_nowait()
        self.rid = None


class Hub:
    """Recycles mailboxes and routes engine outputs to them."""

    def __init__(self, n: int):
        self._spare = deque(Mailbox(i) for i in range(n))
        self.routes: dict[str, Mailbox] = {}

    def open(self, rid: str) -> Mailbox | None:
        if not self._spare:
            return None
        box = self._spare.popleft()  # clean: returned, and known to routes until close
        box.rid = rid
        self.routes[rid] = box
        return box

    def open_anonymous(self) -> Mailbox:
        return self._spare.popleft()  # clean: returned to the caller

    def close(self, box: Mailbox) -> None:
        if box.rid is not None:
            self.routes.pop(box.rid, None)
        box.clear()
        self._spare.append(box)

    def dispatch(self, rid: str, item: Any) -> None:
        box = self.routes.get(rid)
        if box is not None:
            box.q.put_nowait(item)


class DetokStates:
    """Incremental detokenizer states, expensive to build."""

    def __init__(self, factory, cap: int):
        self.factory = factory
        self._idle: list = []
        self._sem = asyncio.Semaphore(cap)

    async def borrow(self):
        await self._sem.acquire()  # clean: released by restore
        return self._idle.pop() if self._idle else self.factory()  # clean: returned to the caller

    async def borrow_n(self, n: int) -> list:
        return [await self.borrow() for _ in range(n)]  # clean: all returned to the caller

    def restore(self, st) -> None:
        st.reset()
        self._idle.append(st)
        self._sem.release()

    @asynccontextmanager
    async def borrowed(self):
        st = await self.borrow()  # clean: restored in finally
        try:
            yield st
        finally:
            self.restore(st)


@dataclass
class StreamCtx:
    rid: str
    box: Mailbox | None = None
    states: list = field(default_factory=list)
    closed: bool = False


class StreamServer:
    def __init__(self, engine, hub: Hub, detok: DetokStates, max_streams: int = 512):
        self.engine = engine
        self.hub = hub
        self.detok = detok
        self.limit = asyncio.Semaphore(max_streams)
        self.ctxs: dict[str, StreamCtx] = {}
        self.tasks: set[asyncio.Task] = set()

    # ---- full streams ----------------------------------------------------------

    async def stream(self, rid: str, body: dict) -> AsyncIterator[str]:
        await self.limit.acquire()  # clean: released in finally
        try:
            box = self.hub.open(rid)  # clean: closed in the inner finally
            if box is None:
                yield self._error(503, "no mailbox")
                return
            try:
                async with self.detok.borrowed() as st:  # clean: context manager
                    await self.engine.submit(rid, body)
                    while (item := await box.q.get()) is not SENTINEL:
                        text = st.feed(item)
                        if text:
                            yield self._event({"text": text})
                yield "data: [DONE]\n\n"
            finally:
                self.hub.close(box)
        finally:
            self.limit.release()

    async def stream_choices(self, rid: str, body: dict) -> AsyncIterator[str]:
        n = int(body.get("n", 1))
        box = self.hub.open(rid)  # leak: the mailbox stays routed when the engine refuses the request
        if box is None:
            yield self._error(503, "no mailbox")
            return
        states = await self.detok.borrow_n(n)  # clean: restored on refusal and in finally
        if not await self.engine.submit(rid, body):
            for st in states:
                self.detok.restore(st)
            yield self._error(429, "queue full")
            return
        try:
            while (item := await box.q.get()) is not SENTINEL:
                text = states[item.index].feed(item)
                yield self._event({"index": item.index, "text": text})
        finally:
            for st in states:
                self.detok.restore(st)
            self.hub.close(box)

    # ---- blocking completions ----------------------------------------------------

    async def complete(self, rid: str, body: dict) -> dict:
        if self.limit.locked():
            return {"error": "busy"}
        await self.limit.acquire()  # leak: not released when the answer times out
        st = await self.detok.borrow()  # clean: restored in the handler and at the end
        try:
            tokens = await asyncio.wait_for(self.engine.generate(rid, body), timeout=60)
        except asyncio.TimeoutError:
            self.detok.restore(st)
            return {"error": "timeout"}
        text = "".join(st.feed(t) for t in tokens)
        self.detok.restore(st)
        self.limit.release()
        return {"text": text}

    async def echo(self, tokens: list[int]) -> str:
        st = await self.detok.borrow()  # leak: empty prompts return before restore
        parts = []
        for tok in tokens:
            parts.append(st.feed(tok) or "")
        if not parts:
            return ""
        self.detok.restore(st)
        return "".join(parts)

    # ---- detached contexts ---------------------------------------------------------

    async def open_ctx(self, rid: str) -> StreamCtx | None:
        box = self.hub.open(rid)  # clean: near miss, moved into the context that close_ctx closes
        if box is None:
            return None
        ctx = StreamCtx(rid, box)
        self.ctxs[rid] = ctx
        return ctx

    async def add_choice(self, ctx: StreamCtx) -> int:
        st = await self.detok.borrow()  # clean: near miss, joins ctx.states unless the context closed meanwhile
        if ctx.closed:
            self.detok.restore(st)
            return -1
        ctx.states.append(st)
        return len(ctx.states) - 1

    def reset_choice(self, ctx: StreamCtx, index: int) -> None:
        st = ctx.states.pop(index)  # leak: the popped state is reset and replaced by nothing
        st.reset()
        log.debug("choice %d of %s reset", index, ctx.rid)

    def close_ctx(self, rid: str) -> None:
        ctx = self.ctxs.pop(rid, None)  # clean: its parts are given back below
        if ctx is None:
            return
        ctx.closed = True
        while ctx.states:
            self.detok.restore(ctx.states.pop())
        if ctx.box is not None:
            self.hub.close(ctx.box)
            ctx.box = None

    async def spawn_pump(self, rid: str, sink) -> bool:
        ctx = await self.open_ctx(rid)  # clean: near miss, the pump task's done callback closes it
        if ctx is None:
            return False
        task = asyncio.create_task(self._pump(ctx, sink))
        self.tasks.add(task)
        task.add_done_callback(lambda t: (self.tasks.discard(t), self.close_ctx(rid)))
        return True

    async def _pump(self, ctx: StreamCtx, sink) -> None:
        while (item := await ctx.box.q.get()) is not SENTINEL:
            await sink.write(self._event({"token": item}))

    async def spawn_tee(self, rid: str, sinks: list) -> bool:
        box = self.hub.open_anonymous()  # leak: the tee coroutine only closes it when every sink survives
        task = asyncio.create_task(self._tee(box, sinks))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        await self.engine.subscribe(rid, box.q)
        return True

    async def _tee(self, box: Mailbox, sinks: list) -> None:
        while (item := await box.q.get()) is not SENTINEL:
            for sink in sinks:
                if sink.is_closing():
                    return
                await sink.write(self._event({"token": item}))
        self.hub.close(box)

    async def shutdown(self) -> None:
        for rid in list(self.ctxs):
            self.close_ctx(rid)
        await self.engine.stop()

    @staticmethod
    def _event(obj: dict) -> str:
        return f"data: {json.dumps(obj)}\n\n"

    def _error(self, code: int, msg: str) -> str:
        return self._event({"error": {"code": code, "message": msg}})
