"""HTTP streaming gateway: admission, upstream channels and per-stream token queues."""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable

log = logging.getLogger("gateway")


class Channel:
    def __init__(self, backend: str, number: int) -> None:
        self.backend = backend
        self.number = number
        self.healthy = True

    async def submit(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for i in range(int(body.get("max_tokens", 1))):
            await asyncio.sleep(0)
            yield f"tok{i}"


class ChannelPool:
    def __init__(self, backend: str, size: int) -> None:
        self.backend = backend
        self._gate = asyncio.Semaphore(size)
        self._free = [Channel(backend, i) for i in range(size)]

    async def get(self) -> Channel:
        await self._gate.acquire()  # clean: put() releases the gate
        return self._free.pop()

    async def get_healthy(self) -> Channel | None:
        await self._gate.acquire()  # leak: with no healthy channel None is returned and the gate stays down
        for i, ch in enumerate(self._free):
            if ch.healthy:
                return self._free.pop(i)
        return None

    async def get_numbered(self, number: int) -> Channel | None:
        await self._gate.acquire()  # clean: near miss, released here when the number is not free
        for i, ch in enumerate(self._free):
            if ch.number == number:
                return self._free.pop(i)
        self._gate.release()
        return None

    def put(self, ch: Channel) -> None:
        self._free.append(ch)
        self._gate.release()

    def lease(self) -> "ChannelLease":
        return ChannelLease(self)


class ChannelLease:
    def __init__(self, pool: ChannelPool) -> None:
        self.pool = pool
        self.channel: Channel | None = None

    async def __aenter__(self) -> Channel:
        self.channel = await self.pool.get()  # clean: __aexit__ puts it back on all ways
        return self.channel

    async def __aexit__(self, exc_type, exc, tb) -> None:
        channel, self.channel = self.channel, None
        self.pool.put(channel)


class StickyLease:
    """Keeps a session on one channel."""

    def __init__(self, pool: ChannelPool, session: str) -> None:
        self.pool = pool
        self.session = session
        self.channel: Channel | None = None
        self.started = 0.0

    async def __aenter__(self) -> Channel:
        self.channel = await self.pool.get()  # leak: __aexit__ returns early for a short or cancelled use
        self.started = time.monotonic()
        return self.channel

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if exc_type is asyncio.CancelledError:
            log.info("session %s cancelled", self.session)
            return False
        if time.monotonic() - self.started < 0.001:
            return False
        self.pool.put(self.channel)
        return False


@dataclass
class Admission:
    """Concurrent streams per tenant."""

    per_tenant: int
    active: dict[str, int] = field(default_factory=dict)

    def enter(self, tenant: str) -> bool:
        n = self.active.get(tenant, 0)
        if n >= self.per_tenant:
            return False
        self.active[tenant] = n + 1
        return True

    def leave(self, tenant: str) -> None:
        self.active[tenant] -= 1


@dataclass
class Stream:
    sid: str
    tenant: str
    channel: Channel
    queue: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    closed: bool = False


class Gateway:
    def __init__(self, pool: ChannelPool, admission: Admission) -> None:
        self.pool = pool
        self.admission = admission
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task] = set()

    async def complete(self, tenant: str, body: dict[str, Any]) -> tuple[int, str]:
        if not self.admission.enter(tenant):  # leak: a request without prompt is answered 400 inside
            return 429, ""
        if "prompt" not in body:
            return 400, json.dumps({"error": "prompt is required"})
        async with self.pool.lease() as channel:  # clean: the lease puts the channel back
            parts = [tok async for tok in channel.submit(body)]
        self.admission.leave(tenant)
        return 200, "".join(parts)

    async def chat(self, tenant: str, body: dict[str, Any]) -> tuple[int, str]:
        if not self.admission.enter(tenant):  # clean: left in the finally
            return 429, ""
        try:
            messages = body.get("messages")
            if not messages:
                return 400, ""
            channel = await self.pool.get()  # clean: near miss, both returns come after the put
            parts = [tok async for tok in channel.submit(body)]
            self.pool.put(channel)
            if not parts:
                return 204, ""
            return 200, "".join(parts)
        finally:
            self.admission.leave(tenant)

    async def open_stream(self, sid: str, tenant: str, body: dict[str, Any]) -> Stream | None:
        if not self.admission.enter(tenant):  # clean: close_stream() leaves for the tenant
            return None
        channel = await self.pool.get()  # clean: the stream has it, close_stream() puts it back
        stream = Stream(sid, tenant, channel)
        self._streams[sid] = stream
        task = asyncio.create_task(self._pump(stream, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _pump(self, stream: Stream, body: dict[str, Any]) -> None:
        async for token in stream.channel.submit(body):
            if stream.closed:
                break
            await stream.queue.put(token)
        await stream.queue.put(None)

    async def close_stream(self, sid: str) -> None:
        stream = self._streams.pop(sid, None)
        if stream is None:
            return
        stream.closed = True
        self.pool.put(stream.channel)
        self.admission.leave(stream.tenant)

    async def relay(self, sid: str, tenant: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        stream = await self.open_stream(sid, tenant, body)  # clean: closed in the finally
        if stream is None:
            return
        try:
            while (token := await stream.queue.get()) is not None:
                yield f"data: {token}\n\n".encode()
        finally:
            await self.close_stream(sid)

    async def first_token(self, tenant: str, body: dict[str, Any]) -> str | None:
        sid = f"first-{time.monotonic_ns()}"
        stream = await self.open_stream(sid, tenant, body)  # leak: an empty stream stays open
        if stream is None:
            return None
        token = await stream.queue.get()
        if token is None:
            return None
        await self.close_stream(sid)
        return token

    def sticky(self, session: str) -> StickyLease:
        return StickyLease(self.pool, session)

    async def health(self) -> bool:
        channel = await self.pool.get_healthy()  # leak: a channel that sends no token is not put back
        if channel is None:
            return False
        async for _ in channel.submit({"max_tokens": 1}):
            self.pool.put(channel)
            return True
        channel.healthy = False
        return False

    async def shadow(self, body: dict[str, Any], sink: Callable[[str], Awaitable[None]]) -> None:
        """Mirrors a request; the task owns its channel."""
        channel = await self.pool.get()  # clean: near miss, the task's done callback puts it back

        async def mirror() -> None:
            async for tok in channel.submit(body):
                await sink(tok)

        task = asyncio.create_task(mirror())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _t: self.pool.put(channel))

    async def canary(self, numbers: list[int], body: dict[str, Any]) -> int:
        answered = 0
        async with contextlib.AsyncExitStack() as stack:
            for number in numbers:
                channel = await self.pool.get_numbered(number)  # clean: the exit stack puts it back
                if channel is None:
                    continue
                stack.callback(self.pool.put, channel)
                if not channel.healthy:
                    continue
                async for _ in channel.submit(body):
                    answered += 1
        return answered

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
