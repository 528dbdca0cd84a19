"""Async gateway in front of model workers: admission permits, upstream connections, token streams."""
from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import AsyncIterator, Callable, Dict, List, Optional


class Overloaded(Exception):
    pass


class Upstream:
    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.host = host
        self.reader = reader
        self.writer = writer
        self.born = time.monotonic()

    def stale(self) -> bool:
        return self.writer.is_closing() or time.monotonic() - self.born > 300

    async def send(self, payload: dict) -> None:
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()

    async def lines(self) -> AsyncIterator[dict]:
        while line := await self.reader.readline():
            yield json.loads(line)

    def close(self) -> None:
        self.writer.close()


class UpstreamPool:
    """Keeps at most `limit` connections per host. A slot of the semaphore goes with each connection."""

    def __init__(self, host: str, port: int, limit: int):
        self.host, self.port = host, port
        self._slots = asyncio.Semaphore(limit)
        self._idle: List[Upstream] = []

    async def lease(self) -> Upstream:
        await self._slots.acquire()  # clean: near miss, hangup() and park() release it and a failed connect does so here
        if self._idle:
            return self._idle.pop()
        try:
            r, w = await asyncio.open_connection(self.host, self.port)  # clean: wrapped in the Upstream that is returned
        except OSError:
            self._slots.release()
            raise
        return Upstream(self.host, r, w)

    async def lease_fresh(self) -> Upstream:
        """Like lease(), but a connection that has gone stale is not handed out."""
        await self._slots.acquire()  # leak: a failed connect leaves the slot taken
        while self._idle:
            up = self._idle.pop()  # clean: closed when stale, else returned
            if not up.stale():
                return up
            up.close()
        try:
            r, w = await asyncio.open_connection(self.host, self.port)  # clean: wrapped in the Upstream that is returned
        except OSError as e:
            raise Overloaded(str(e)) from e
        return Upstream(self.host, r, w)

    def park(self, up: Upstream) -> None:
        if up.stale():
            up.close()
        else:
            self._idle.append(up)
        self._slots.release()

    def hangup(self, up: Upstream) -> None:
        up.close()
        self._slots.release()

    @contextlib.asynccontextmanager
    async def connection(self):
        up = await self.lease()  # clean: hung up on an error, parked otherwise
        try:
            yield up
        except BaseException:
            self.hangup(up)
            raise
        else:
            self.park(up)


class TokenBudget:
    """Tokens in flight over all requests, by a counter."""

    def __init__(self, total: int):
        self.total = total
        self.left = total

    def debit(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def credit(self, n: int) -> None:
        self.left += n


class Gateway:
    def __init__(self, pools: Dict[str, UpstreamPool], budget: TokenBudget, max_streams: int):
        self.pools = pools
        self.budget = budget
        self.permits = asyncio.Semaphore(max_streams)
        self.live: Dict[str, Upstream] = {}
        self.tasks: set = set()

    # -- unary ------------------------------------------------------------

    async def complete(self, model: str, prompt: str, max_tokens: int) -> str:
        if not self.budget.debit(max_tokens):  # clean: credited in finally
            raise Overloaded("token budget")
        try:
            async with self.pools[model].connection() as up:  # clean: the context manager parks or hangs up
                await up.send({"prompt": prompt, "max_tokens": max_tokens})
                return "".join([m["text"] async for m in up.lines()])
        finally:
            self.budget.credit(max_tokens)

    async def embed(self, model: str, text: str) -> Optional[List[float]]:
        up = await self.pools[model].lease()  # leak: an empty answer returns before park()
        await up.send({"embed": text})
        line = await up.reader.readline()
        if not line:
            return None
        vec = json.loads(line)["vector"]
        self.pools[model].park(up)
        return vec

    # -- streaming --------------------------------------------------------

    async def stream(self, model: str, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        await self.permits.acquire()  # clean: released in finally of the generator
        try:
            async with self.pools[model].connection() as up:  # clean: the context manager parks or hangs up
                await up.send({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
                async for m in up.lines():
                    if m.get("done"):
                        return
                    yield m["text"]
        finally:
            self.permits.release()

    async def stream_budgeted(self, model: str, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        await self.permits.acquire()  # leak: stays taken when the token budget is short
        if not self.budget.debit(max_tokens):  # clean: credited in finally
            raise Overloaded("token budget")
        try:
            async with self.pools[model].connection() as up:  # clean: the context manager parks or hangs up
                await up.send({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
                async for m in up.lines():
                    yield m["text"]
        finally:
            self.budget.credit(max_tokens)
            self.permits.release()

    async def open_session(self, sid: str, model: str) -> None:
        if sid in self.live:
            raise ValueError(f"session {sid} is open")
        up = await self.pools[model].lease()  # clean: near miss, hung up when another open won the race, else filed in self.live
        if sid in self.live:
            self.pools[model].hangup(up)
            raise ValueError(f"session {sid} is open")
        self.live[sid] = up

    async def migrate_session(self, sid: str, src: str, dst: str) -> bool:
        """Move a session's KV to another worker; on refusal it stays where it is."""
        old = self.live[sid]
        new = await self.pools[dst].lease()  # leak: dropped when the source refuses to export
        await old.send({"export": sid})
        blob = await old.reader.readline()
        if not blob or b"refused" in blob:
            return False
        new.writer.write(blob)
        await new.writer.drain()
        self.live[sid] = new
        self.pools[src].park(old)
        return True

    def close_session(self, sid: str, model: str) -> None:
        up = self.live.pop(sid, None)
        if up is not None:
            self.pools[model].hangup(up)

    # -- fire and forget --------------------------------------------------

    def spawn(self, model: str, prompt: str, cost: int, cb: Callable[[str], None]) -> bool:
        if not self.budget.debit(cost):  # clean: near miss, the task's done callback credits it
            return False

        async def body() -> None:
            async with self.pools[model].connection() as up:  # clean: the context manager parks or hangs up
                await up.send({"prompt": prompt})
                cb((await up.reader.readline()).decode())

        task = asyncio.ensure_future(body())
        self.tasks.add(task)

        def finished(t: asyncio.Task) -> None:
            self.tasks.discard(t)
            self.budget.credit(cost)

        task.add_done_callback(finished)
        return True

    def spawn_batch(self, model: str, prompts: List[str], cost: int) -> int:
        started = 0
        for p in prompts:
            if not self.budget.debit(cost):  # leak: an over-long prompt is skipped after its debit
                break
            if len(p) > 16384:
                continue
            task = asyncio.ensure_future(self.complete(model, p, 16))
            self.tasks.add(task)
            task.add_done_callback(lambda t: (self.tasks.discard(t), self.budget.credit(cost)))
            started += 1
        return started
