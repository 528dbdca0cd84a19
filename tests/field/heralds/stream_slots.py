"""Decode slots behind the server-sent-event endpoints.

The engine has a fixed number of batch rows ("slots").  Everything that
generates needs one: single shot streams, n-best requests, chats that keep
their row between turns, and clients that reconnect to a running stream.
"""
import asyncio
import logging
import time
from contextlib import asynccontextmanager, AsyncExitStack
from typing import AsyncIterator, Protocol

log = logging.getLogger("sse")


class Busy(Exception):
    """No slot within the time; becomes HTTP 429."""


class Engine(Protocol):
    def tokens(self, slot: int, prompt: str) -> AsyncIterator[str]: ...
    async def prefill(self, slot: int, prompt: str) -> None: ...
    async def reset(self, slot: int) -> None: ...


class Request(Protocol):
    id: str
    prompt: str
    n: int

    async def is_disconnected(self) -> bool: ...


class SlotTable:
    def __init__(self, engine: Engine, n: int, patience: float = 5.0) -> None:
        self.engine = engine
        self.patience = patience
        self._idle = set(range(n))
        self._cond = asyncio.Condition()
        self._taken_at: dict[int, float] = {}

    async def take(self) -> int:
        deadline = time.monotonic() + self.patience
        async with self._cond:
            while not self._idle:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Busy()
                try:
                    await asyncio.wait_for(self._cond.wait(), left)
                except asyncio.TimeoutError:
                    raise Busy() from None
            slot = self._idle.pop()  # clean: returned to the caller
            self._taken_at[slot] = time.monotonic()
            return slot

    async def take_clean(self) -> int:
        """A slot whose KV rows are zeroed."""
        slot = await self.take()  # clean: near miss, put back when the reset fails, otherwise returned
        try:
            await self.engine.reset(slot)
        except RuntimeError as exc:
            await self.put(slot)
            raise Busy() from exc
        return slot

    def take_nowait(self, exclude: frozenset[int] = frozenset()) -> int | None:
        """Any idle slot which is not excluded (rows of a failing SM, say)."""
        for _ in range(len(self._idle)):
            slot = self._idle.pop()  # leak: an excluded slot is popped and not added again
            if slot not in exclude:
                self._taken_at[slot] = time.monotonic()
                return slot
        return None

    async def put(self, slot: int) -> None:
        async with self._cond:
            self._taken_at.pop(slot, None)
            self._idle.add(slot)
            self._cond.notify()

    @asynccontextmanager
    async def slot(self):
        slot = await self.take()  # clean: the finally
        try:
            yield slot
        finally:
            await self.put(slot)


def sse(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode()


async def completions(req: Request, slots: SlotTable) -> AsyncIterator[bytes]:
    async with slots.slot() as slot:  # clean: async with
        async for tok in slots.engine.tokens(slot, req.prompt):
            if await req.is_disconnected():
                return
            yield sse("token", tok)
        yield sse("done", "")


async def completions_v1(req: Request, slots: SlotTable) -> AsyncIterator[bytes]:
    """The old endpoint, still used by the plugins."""
    slot = await slots.take_clean()  # leak: a client which hung up during prefill ends the generator before the try
    await slots.engine.prefill(slot, req.prompt)
    if await req.is_disconnected():
        log.info("%s left during prefill", req.id)
        return
    try:
        async for tok in slots.engine.tokens(slot, ""):
            yield sse("token", tok)
    finally:
        await slots.put(slot)


async def n_best(req: Request, slots: SlotTable) -> list[str]:
    """Greedy n-best: all rows at once."""
    rows = await asyncio.gather(*(slots.take() for _ in range(req.n)))  # leak: one Busy makes gather raise, the rows of the other takes are lost
    try:
        return await asyncio.gather(*(_collect(slots.engine, row, req.prompt) for row in rows))
    finally:
        for row in rows:
            await slots.put(row)


async def n_sampled(req: Request, slots: SlotTable) -> list[str]:
    async with AsyncExitStack() as stack:
        rows = [await stack.enter_async_context(slots.slot()) for _ in range(req.n)]  # clean: near miss, the exit stack unwinds those entered before a Busy
        return await asyncio.gather(*(_collect(slots.engine, row, req.prompt) for row in rows))


async def _collect(engine: Engine, slot: int, prompt: str) -> str:
    return "".join([tok async for tok in engine.tokens(slot, prompt)])


class Chat:
    """A conversation that keeps its row, and so its KV cache, between turns."""

    def __init__(self, slots: SlotTable, chat_id: str) -> None:
        self.slots = slots
        self.chat_id = chat_id
        self.slot: int | None = None
        self.touched = time.monotonic()

    async def turn(self, text: str) -> AsyncIterator[bytes]:
        self.touched = time.monotonic()
        if self.slot is None:
            self.slot = await self.slots.take_clean()  # leak: ChatStore.expire deletes an old chat without end()
        async for tok in self.slots.engine.tokens(self.slot, text):
            yield sse("token", tok)

    async def end(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            await self.slots.put(slot)


class ChatStore:
    def __init__(self, slots: SlotTable, max_age: float = 900.0) -> None:
        self.slots = slots
        self.max_age = max_age
        self.chats: dict[str, Chat] = {}

    def get(self, chat_id: str) -> Chat:
        return self.chats.setdefault(chat_id, Chat(self.slots, chat_id))

    async def delete(self, chat_id: str) -> None:
        chat = self.chats.pop(chat_id, None)
        if chat is not None:
            await chat.end()

    def expire(self) -> int:
        limit = time.monotonic() - self.max_age
        stale = [cid for cid, chat in self.chats.items() if chat.touched < limit]
        for cid in stale:
            del self.chats[cid]
        return len(stale)


class Broadcast:
    """A stream that outlives its connection; clients reconnect with the id."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self.buffers: dict[str, list[str]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self, req: Request) -> None:
        slot = await self.slots.take()  # clean: near miss, ownership moves to the task, whose finally puts it back
        self.buffers[req.id] = []
        task = asyncio.create_task(self._pump(slot, req.id, req.prompt))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _pump(self, slot: int, rid: str, prompt: str) -> None:
        try:
            async for tok in self.slots.engine.tokens(slot, prompt):
                self.buffers[rid].append(tok)
        except RuntimeError as exc:
            log.error("%s: %s", rid, exc)
        finally:
            await self.slots.put(slot)

    async def start_opportunistic(self, req: Request, broken: frozenset[int]) -> bool:
        slot = self.slots.take_nowait(broken)  # clean: None or the task of _pump puts it back
        if slot is None:
            return False
        self.buffers[req.id] = []
        task = asyncio.create_task(self._pump(slot, req.id, req.prompt))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def drain(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def migrate(req: Request, small: SlotTable, large: SlotTable, limit: int) -> str:
    """Start on the small engine, change to the large one for long answers."""
    table, slot = small, await small.take()  # leak: rebinding to the large engine's slot drops the small one
    try:
        parts: list[str] = []
        async for tok in table.engine.tokens(slot, req.prompt):
            parts.append(tok)
            if len(parts) == limit:
                break
        else:
            return "".join(parts)
        table, slot = large, await large.take()  # clean: the finally puts back what slot names by then
        text = "".join(parts)
        return text + await _collect(table.engine, slot, req.prompt + text)
    finally:
        await table.put(slot)
