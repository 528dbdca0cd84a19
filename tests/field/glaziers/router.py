"""OpenAI-compatible front router: admission, upstream connections, streaming relay."""
from __future__ import annotations

import asyncio
import random
from typing import Any, AsyncIterator, Awaitable, Callable


class Upstream:
    def __init__(self, url: str, limit: int):
        self.url = url
        self.limit = limit
        self.inflight = 0

    def try_admit(self) -> bool:
        if self.inflight >= self.limit:
            return False
        self.inflight += 1
        return True

    def leave(self) -> None:
        self.inflight -= 1


class Conn:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def roundtrip(self, payload: bytes) -> tuple[int, bytes]:
        self.writer.write(payload + b"\n")
        await self.writer.drain()
        status, _, body = (await self.reader.readline()).partition(b" ")
        return int(status or 502), body


class ConnPool:
    def __init__(self, dial: Callable[[str], Awaitable[Conn]], size: int = 32):
        self._dial = dial
        self._gate = asyncio.BoundedSemaphore(size)
        self._idle: dict[str, list[Conn]] = {}

    async def lease(self, url: str) -> Conn:
        await self._gate.acquire()  # clean: near miss, given up when the dial fails, else by give or discard
        idle = self._idle.get(url)
        if idle:
            return idle.pop()
        try:
            return await self._dial(url)
        except BaseException:
            self._gate.release()
            raise

    def give(self, url: str, conn: Conn) -> None:
        self._idle.setdefault(url, []).append(conn)
        self._gate.release()

    def discard(self, conn: Conn) -> None:
        conn.writer.close()
        self._gate.release()


class Router:
    def __init__(self, upstreams: list[Upstream], pool: ConnPool):
        self.upstreams = upstreams
        self.pool = pool
        self.cache: dict[bytes, bytes] = {}
        self._mirrors: set[asyncio.Task[None]] = set()

    def pick(self) -> Upstream | None:
        for up in sorted(self.upstreams, key=lambda u: u.inflight):
            if up.try_admit():  # clean: handed to the caller as the admitted upstream
                return up
        return None

    def pick_two(self) -> tuple[Upstream, Upstream] | None:
        first = self.pick()  # clean: near miss, leaves when there is no second, else the caller has both
        if first is None:
            return None
        second = self.pick()  # clean: handed to the caller
        if second is None:
            first.leave()
            return None
        return first, second

    async def completion(self, payload: bytes) -> tuple[int, bytes]:
        up = self.pick()  # leak: the cached answer returns with the upstream still counted busy
        if up is None:
            return 429, b"overloaded"
        hit = self.cache.get(payload)
        if hit is not None:
            return 200, hit
        try:
            conn = await self.pool.lease(up.url)  # clean: near miss, discarded on a reset, otherwise given back
            try:
                status, body = await conn.roundtrip(payload)
            except ConnectionResetError:
                self.pool.discard(conn)
                return 502, b""
            except asyncio.CancelledError:
                self.pool.discard(conn)
                raise
            self.pool.give(up.url, conn)
        finally:
            up.leave()
        if status == 200:
            self.cache[payload] = body
        return status, body

    async def embed(self, payload: bytes, attempts: int = 3) -> tuple[int, bytes]:
        for i in range(attempts):
            up = self.pick()  # clean: near miss, the finally leaves on every turn of the loop
            if up is None:
                await asyncio.sleep(0.05 * 2 ** i)
                continue
            try:
                conn = await self.pool.lease(up.url)  # leak: a reset connection is retried without being discarded
                try:
                    reply = await conn.roundtrip(payload)
                except ConnectionResetError:
                    continue
                self.pool.give(up.url, conn)
                return reply
            finally:
                up.leave()
        return 503, b""

    async def hedged(self, payload: bytes) -> tuple[int, bytes]:
        pair = self.pick_two()  # leak: only the winner's upstream is left, the loser's stays counted
        if pair is None:
            return 429, b""
        tasks = {asyncio.create_task(self._send(up, payload)): up for up in pair}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for t in pending:
            t.cancel()
        winner = done.pop()
        tasks[winner].leave()
        return winner.result()

    async def _send(self, up: Upstream, payload: bytes) -> tuple[int, bytes]:
        conn = await self.pool.lease(up.url)  # clean: near miss, the flag decides between give and discard
        ok = False
        try:
            reply = await conn.roundtrip(payload)
            ok = True
            return reply
        finally:
            if ok:
                self.pool.give(up.url, conn)
            else:
                self.pool.discard(conn)

    async def open_stream(self, payload: bytes) -> AsyncIterator[bytes] | None:
        up = self.pick()  # leak: an upstream that refuses the stream is not left
        if up is None:
            return None
        conn = await self.pool.lease(up.url)  # clean: discarded on refusal, otherwise _relay discards it at the end
        status, _ = await conn.roundtrip(payload)
        if status != 200:
            self.pool.discard(conn)
            return None
        return self._relay(up, conn)

    async def _relay(self, up: Upstream, conn: Conn) -> AsyncIterator[bytes]:
        try:
            while line := await conn.reader.readline():
                if line == b"data: [DONE]\n":
                    break
                yield line
        finally:
            self.pool.discard(conn)
            up.leave()

    def mirror(self, payload: bytes, rate: float) -> None:
        if random.random() > rate:
            return
        up = self.pick()  # clean: near miss, moves into the task, which leaves it in its finally
        if up is None:
            return
        task = asyncio.create_task(self._mirror(up, payload))
        self._mirrors.add(task)
        task.add_done_callback(self._mirrors.discard)

    async def _mirror(self, up: Upstream, payload: bytes) -> None:
        try:
            await self._send(up, payload)
        finally:
            up.leave()

    def stats(self) -> dict[str, Any]:
        return {u.url: u.inflight for u in self.upstreams}
