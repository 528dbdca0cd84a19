"""Asynchronous prefetch of remote parameter shards over a pool of connections."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Deque, Dict, List, Optional, Set

log = logging.getLogger(__name__)


class Connection:
    def __init__(self, peer: str):
        self.peer = peer
        self.healthy = True
        self.served = 0

    async def fetch(self, key: str) -> bytes:
        await asyncio.sleep(0)
        self.served += 1
        return key.encode()


class ConnectionPool:
    """Keeps at most `limit` connections per peer set, LIFO so that the warm ones are reused."""

    def __init__(self, peers: List[str], limit: int):
        self._idle: Deque[Connection] = deque(Connection(p) for p in peers for _ in range(limit))
        self._available = asyncio.Condition()
        self.waiting = 0

    async def checkout(self) -> Connection:
        async with self._available:
            self.waiting += 1
            await self._available.wait_for(lambda: bool(self._idle))
            self.waiting -= 1
            return self._idle.pop()

    async def checkout_within(self, seconds: float) -> Optional[Connection]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            async with self._available:
                if self._idle:
                    return self._idle.pop()
            await asyncio.sleep(0.005)
        return None

    async def checkin(self, conn: Connection) -> None:
        async with self._available:
            self._idle.append(conn)
            self._available.notify()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        conn = await self.checkout()  # clean: checked in in finally
        try:
            yield conn
        finally:
            await self.checkin(conn)


@dataclass
class Prefetch:
    key: str
    conn: Optional[Connection] = None
    task: Optional[asyncio.Task] = None
    issued: float = field(default_factory=time.monotonic)


class Prefetcher:
    def __init__(self, pool: ConnectionPool, window: int):
        self.pool = pool
        self._window = asyncio.Semaphore(window)
        self._running: Dict[str, Prefetch] = {}
        self._cache: Dict[str, bytes] = {}
        self._background: Set[asyncio.Task] = set()

    async def fetch(self, key: str) -> bytes:
        if key in self._cache:
            return self._cache[key]
        conn = await self.pool.checkout()  # clean: checked in in finally
        try:
            data = await conn.fetch(key)
            self._cache[key] = data
            return data
        finally:
            await self.pool.checkin(conn)

    async def fetch_fresh(self, key: str, version: int) -> Optional[bytes]:
        conn = await self.pool.checkout()  # leak: a stale answer returns without checkin
        data = await conn.fetch(f"{key}@{version}")
        if not data.endswith(str(version).encode()):
            log.warning("stale shard %s", key)
            return None
        await self.pool.checkin(conn)
        return data

    async def fetch_any(self, keys: List[str]) -> Optional[bytes]:
        for key in keys:
            async with self.pool.connection() as conn:  # clean: with block
                data = await conn.fetch(key)
                if data:
                    return data
        return None

    async def fetch_hedged(self, key: str) -> bytes:
        """Ask a second peer when the first is slow."""
        first = await self.pool.checkout()  # clean: checked in at the end
        second = await self.pool.checkout_within(0.05)  # leak: checked in only if its answer wins
        if second is None:
            data = await first.fetch(key)
            await self.pool.checkin(first)
            return data
        a = asyncio.ensure_future(first.fetch(key))
        b = asyncio.ensure_future(second.fetch(key))
        done, pending = await asyncio.wait({a, b}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        winner = done.pop()
        await self.pool.checkin(first)
        if winner is b:
            await self.pool.checkin(second)
        return winner.result()

    async def fetch_quorum(self, key: str, count: int) -> List[bytes]:
        conns: List[Connection] = []
        for _ in range(count):
            conn = await self.pool.checkout_within(0.1)  # clean: near miss, all of the list is checked in
            if conn is None:
                break
            conns.append(conn)
        answers = await asyncio.gather(*(c.fetch(key) for c in conns))
        for conn in conns:
            await self.pool.checkin(conn)
        return list(answers)

    async def start(self, key: str) -> None:
        if key in self._running or key in self._cache:
            return
        await self._window.acquire()  # clean: near miss, released here, by finish or by cancel_all
        conn = await self.pool.checkout()  # clean: near miss, back here, by finish or by cancel_all
        if key in self._running:
            await self.pool.checkin(conn)
            self._window.release()
            return
        entry = Prefetch(key, conn)
        entry.task = asyncio.ensure_future(conn.fetch(key))
        self._running[key] = entry

    async def finish(self, key: str) -> bytes:
        entry = self._running.pop(key, None)
        if entry is None:
            return await self.fetch(key)
        data = await entry.task
        self._cache[key] = data
        await self.pool.checkin(entry.conn)
        self._window.release()
        return data

    async def cancel_all(self) -> None:
        while self._running:
            _, entry = self._running.popitem()
            entry.task.cancel()
            await self.pool.checkin(entry.conn)
            self._window.release()

    async def spawn(self, key: str) -> None:
        """Fire and forget; the done callback frees the window."""
        await self._window.acquire()  # clean: near miss, the done callback releases it
        task = asyncio.ensure_future(self.fetch(key))
        self._background.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task) -> None:
        self._background.discard(task)
        self._window.release()

    async def spawn_quiet(self, key: str) -> None:
        await self._window.acquire()  # leak: the done callback only discards the task
        task = asyncio.ensure_future(self.fetch(key))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def throttle(self, keys: List[str]) -> int:
        fetched = 0
        for key in keys:
            await self._window.acquire()  # leak: a key that is cached already goes on without release
            if key in self._cache:
                continue
            await self.fetch(key)
            fetched += 1
            self._window.release()
        return fetched

    async def throttle_scoped(self, keys: List[str]) -> int:
        fetched = 0
        for key in keys:
            async with self._window:
                if key in self._cache:
                    continue
                await self.fetch(key)
                fetched += 1
        return fetched


class PinnedSession:
    """Keeps one connection over many fetches of one task and changes it when it turns sick."""

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        self._conn: Optional[Connection] = None

    async def _ensure(self) -> Connection:
        if self._conn is not None and self._conn.healthy:
            return self._conn
        if self._conn is not None:
            await self._pool.checkin(self._conn)
        self._conn = await self._pool.checkout()  # clean: near miss, the old one went back, close ends it
        return self._conn

    async def get(self, key: str) -> bytes:
        conn = await self._ensure()
        return await conn.fetch(key)

    async def close(self) -> None:
        if self._conn is not None:
            await self._pool.checkin(self._conn)
            self._conn = None


class RoamingSession:
    """Changes the connection of one task every few fetches."""

    def __init__(self, pool: ConnectionPool, every: int):
        self._pool = pool
        self._every = every
        self._count = 0
        self._conn: Optional[Connection] = None

    async def get(self, key: str) -> bytes:
        if self._conn is None or self._count % self._every == 0:
            self._conn = await self._pool.checkout()  # leak: the connection held before is overwritten
        self._count += 1
        return await self._conn.fetch(key)

    async def close(self) -> None:
        if self._conn is not None:
            await self._pool.checkin(self._conn)
            self._conn = None


async def measure_latency(pool: ConnectionPool, key: str) -> float:
    began = time.perf_counter()
    await (await pool.checkout()).fetch(key)  # leak: the connection has no name and never goes back
    return time.perf_counter() - began
