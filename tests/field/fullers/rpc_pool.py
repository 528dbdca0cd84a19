"""Connection pool for the embedding backends, with the client calls built over it."""
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, AsyncIterator, Deque, List, Optional

log = logging.getLogger("rpc")
EOS = b""


class Connection:
    def __init__(self, host: str, serial: int) -> None:
        self.host = host
        self.serial = serial
        self.closed = False
        self.model: Optional[str] = None

    async def call(self, method: str, payload: Any) -> Any:
        if self.closed:
            raise ConnectionError(f"{self.host} is closed")
        await asyncio.sleep(0)
        return {"method": method, "payload": payload}

    async def chunks(self, payload: Any) -> AsyncIterator[bytes]:
        for part in (b"a", b"b", EOS):
            await asyncio.sleep(0)
            yield part

    def close(self) -> None:
        self.closed = True


class ConnectionPool:
    def __init__(self, host: str, size: int) -> None:
        self.host = host
        self.size = size
        self._idle: Deque[Connection] = deque(Connection(host, i) for i in range(size))
        self._serial = size

    def idle(self) -> int:
        return len(self._idle)

    async def checkout(self) -> Connection:
        while not self._idle:
            await asyncio.sleep(0.001)
        return self._idle.popleft()

    def try_checkout(self) -> Optional[Connection]:
        return self._idle.popleft() if self._idle else None

    def checkin(self, conn: Connection) -> None:
        self._idle.append(conn)

    def discard(self, conn: Connection) -> None:
        """Close a broken connection and put a fresh one in its place."""
        conn.close()
        self._serial += 1
        self._idle.append(Connection(self.host, self._serial))

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        conn = await self.checkout()  # clean: checked in by the finally
        try:
            yield conn
        finally:
            self.checkin(conn)


class BackendClient:
    def __init__(self, pool: ConnectionPool, retries: int = 3) -> None:
        self.pool = pool
        self.retries = retries

    async def call_with_retry(self, method: str, payload: Any) -> Any:
        for attempt in range(self.retries):
            conn = await self.pool.checkout()  # leak: a failed attempt goes on without giving its connection up
            try:
                reply = await conn.call(method, payload)
            except ConnectionError as exc:
                log.warning("attempt %d on %s failed: %s", attempt, conn.host, exc)
                await asyncio.sleep(0.01 * attempt)
                continue
            self.pool.checkin(conn)
            return reply
        return None

    async def call_with_backoff(self, method: str, payload: Any) -> Any:
        delay = 0.01
        for _ in range(self.retries):
            conn = await self.pool.checkout()  # clean: near miss, discarded before the continue
            try:
                reply = await conn.call(method, payload)
            except ConnectionError:
                self.pool.discard(conn)
                await asyncio.sleep(delay)
                delay *= 2
                continue
            self.pool.checkin(conn)
            return reply
        raise TimeoutError(method)

    async def hedged_call(self, method: str, payload: Any, patience: float) -> Any:
        primary = await self.pool.checkout()  # leak: after the timeout only the backup is checked in
        try:
            reply = await asyncio.wait_for(primary.call(method, payload), patience)
        except asyncio.TimeoutError:
            backup = await self.pool.checkout()  # clean: checked in before the return
            reply = await backup.call(method, payload)
            self.pool.checkin(backup)
            return reply
        self.pool.checkin(primary)
        return reply

    async def call_fresh(self, method: str, payload: Any) -> Any:
        conn = await self.pool.checkout()  # leak: rebound when it turns out closed
        if conn.closed:
            log.info("stale connection %d", conn.serial)
            conn = await self.pool.checkout()  # clean: checked in below
        reply = await conn.call(method, payload)
        self.pool.checkin(conn)
        return reply

    async def call_reconnecting(self, method: str, payload: Any) -> Any:
        conn = await self.pool.checkout()  # clean: near miss, discarded before the name is bound anew
        while conn.closed:
            self.pool.discard(conn)
            conn = await self.pool.checkout()  # clean: discarded by the next round or checked in below
        try:
            return await conn.call(method, payload)
        finally:
            self.pool.checkin(conn)

    async def stream(self, payload: Any) -> AsyncIterator[bytes]:
        conn = await self.pool.checkout()  # leak: the reader breaks at end of sequence and the last line is never run
        async for chunk in conn.chunks(payload):
            yield chunk
        self.pool.checkin(conn)

    async def stream_closing(self, payload: Any) -> AsyncIterator[bytes]:
        conn = await self.pool.checkout()  # clean: checked in by the finally when the generator closes
        try:
            async for chunk in conn.chunks(payload):
                yield chunk
        finally:
            self.pool.checkin(conn)

    async def generate(self, payload: Any) -> bytes:
        out = bytearray()
        async for chunk in self.stream(payload):
            if chunk == EOS:
                break
            out += chunk
        return bytes(out)

    async def generate_closing(self, payload: Any) -> bytes:
        out = bytearray()
        async with contextlib.aclosing(self.stream_closing(payload)) as chunks:
            async for chunk in chunks:
                if chunk == EOS:
                    break
                out += chunk
        return bytes(out)

    async def _lease(self) -> Connection:
        return await self.pool.checkout()  # clean: returned to the caller

    async def _lease_for(self, model: str) -> Connection:
        conn = await self._lease()  # clean: returned to the caller
        conn.model = model
        return conn

    async def embed(self, text: str) -> Optional[List[float]]:
        conn = await self._lease_for("embed-small")  # leak: an empty reply returns without a checkin
        reply = await conn.call("embed", text)
        if not reply["payload"]:
            return None
        self.pool.checkin(conn)
        return [float(len(text))]

    async def rerank(self, query: str, docs: List[str]) -> List[int]:
        conn = await self._lease_for("rerank-base")  # clean: checked in by the finally
        try:
            if not docs:
                return []
            await conn.call("rerank", (query, docs))
            return sorted(range(len(docs)), key=lambda i: -len(docs[i]))
        finally:
            self.pool.checkin(conn)

    async def warm_up(self, n: int) -> None:
        conns = [await self.pool.checkout() for _ in range(n)]  # clean: each one of the list is checked in
        await asyncio.gather(*(c.call("ping", None) for c in conns))
        for conn in conns:
            self.pool.checkin(conn)

    def probe(self) -> bool:
        conn = self.pool.try_checkout()  # leak: a dead connection is neither checked in nor discarded
        if conn is None:
            return True
        alive = not conn.closed
        if alive:
            self.pool.checkin(conn)
        return alive

    async def ping(self) -> bool:
        async with self.pool.connection() as conn:  # clean: the context manager checks it in
            reply = await conn.call("ping", None)
        return reply is not None


async def _main() -> None:
    pool = ConnectionPool("localhost:7000", 4)
    client = BackendClient(pool)
    await client.warm_up(3)
    assert await client.ping() and client.probe()
    assert await client.generate_closing("hi") == b"ab"
    assert await client.rerank("q", ["a", "bbb"]) == [1, 0]
    assert pool.idle() == 4


if __name__ == "__main__":
    asyncio.run(_main())
