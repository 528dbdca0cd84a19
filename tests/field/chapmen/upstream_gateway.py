"""OpenAI-style gateway: pooled upstream connections and streamed replies."""
from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import deque
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, AsyncIterator, Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class Upstream:
    def __init__(self, host: str, serial: int) -> None:
        self.host = host
        self.serial = serial
        self.broken = False
        self.served = 0

    async def post(self, path: str, body: Dict[str, Any]) -> int:
        self.served += 1
        await asyncio.sleep(0)
        return 200 if json.dumps(body) and path else 500

    async def lines(self) -> AsyncIterator[str]:
        for i in range(self.served):
            await asyncio.sleep(0)
            yield f"data: {i}"


class UpstreamPool:
    """Connections per host. Each checkout counts against `limit`."""

    def __init__(self, hosts: List[str], limit: int) -> None:
        self.hosts = hosts
        self.limit = limit
        self._idle: Dict[str, Deque[Upstream]] = {h: deque() for h in hosts}
        self._open = 0
        self._serial = 0
        self._cond = asyncio.Condition()

    async def checkout(self, host: Optional[str] = None) -> Upstream:
        host = host or random.choice(self.hosts)
        async with self._cond:
            while self._open >= self.limit:
                await self._cond.wait()
            self._open += 1
            if self._idle[host]:
                return self._idle[host].popleft()
            self._serial += 1
            return Upstream(host, self._serial)

    async def checkin(self, conn: Upstream) -> None:
        async with self._cond:
            self._open -= 1
            if not conn.broken:
                self._idle[conn.host].append(conn)
            self._cond.notify()

    async def discard(self, conn: Upstream) -> None:
        conn.broken = True
        await self.checkin(conn)

    @asynccontextmanager
    async def connection(self, host: Optional[str] = None) -> AsyncIterator[Upstream]:
        conn = await self.checkout(host)  # clean: checked in by finally
        try:
            yield conn
        finally:
            await self.checkin(conn)


class Gateway:
    def __init__(self, pool: UpstreamPool) -> None:
        self.pool = pool
        self.streams: Dict[str, Upstream] = {}
        self.sticky: Dict[str, Upstream] = {}

    # -- single calls --------------------------------------------------

    async def complete(self, body: Dict[str, Any]) -> int:
        async with self.pool.connection() as conn:  # clean: the context manager checks in
            status = await conn.post("/v1/completions", body)
            if status != 200:
                return status
            async for line in conn.lines():
                if line.endswith("[DONE]"):
                    break
            return status

    async def complete_with_retry(self, body: Dict[str, Any], tries: int) -> int:
        status = 503
        for attempt in range(tries):
            conn = await self.pool.checkout()  # leak: connections of the failed tries are overwritten
            status = await conn.post("/v1/completions", body)
            if status == 200:
                await self.pool.checkin(conn)
                return status
            logger.info("try %d on %s: %d", attempt, conn.host, status)
            await asyncio.sleep(0.05 * 2 ** attempt)
        return status

    async def complete_hedged(self, body: Dict[str, Any], host: str) -> int:
        """A failed call goes to a second connection, the first is dropped."""
        conn = await self.pool.checkout(host)  # clean: near miss, discarded before it is replaced
        status = await conn.post("/v1/completions", body)
        if status != 200:
            await self.pool.discard(conn)
            conn = await self.pool.checkout()  # clean: checked in by the common line below
            status = await conn.post("/v1/completions", body)
        await self.pool.checkin(conn)
        return status

    async def health(self) -> Dict[str, bool]:
        report: Dict[str, bool] = {}
        for host in self.pool.hosts:
            conn = await self.pool.checkout(host)  # leak: unhealthy hosts continue before the checkin
            status = await conn.post("/health", {})
            if status != 200:
                report[host] = False
                continue
            report[host] = True
            await self.pool.checkin(conn)
        return report

    async def broadcast(self, path: str, body: Dict[str, Any]) -> List[int]:
        """One connection to each host at the same time."""
        async with AsyncExitStack() as stack:
            conns = []
            for host in self.pool.hosts:
                conn = await self.pool.checkout(host)  # clean: near miss, pushed on the exit stack
                stack.push_async_callback(self.pool.checkin, conn)
                conns.append(conn)
            return list(await asyncio.gather(*(c.post(path, body) for c in conns)))

    async def models(self) -> List[str]:
        names: List[str] = []
        conns = [await self.pool.checkout(h) for h in self.pool.hosts]  # leak: zip skips the last ones
        statuses = await asyncio.gather(*(c.post("/v1/models", {"list": True}) for c in conns))
        alive = [status for status in statuses if status == 200]
        for conn, _ in zip(conns, alive):
            names.append(conn.host)
            await self.pool.checkin(conn)
        return names

    # -- streams -------------------------------------------------------

    async def _begin(self, body: Dict[str, Any]) -> Optional[Upstream]:
        conn = await self.pool.checkout()  # clean: handed on when the stream began, else discarded
        status = await conn.post("/v1/chat/completions", {**body, "stream": True})
        if status != 200:
            await self.pool.discard(conn)
            return None
        return conn

    async def stream(self, body: Dict[str, Any]) -> AsyncIterator[str]:
        conn = await self._begin(body)  # clean: near miss, the generator's finally checks it in
        if conn is None:
            yield "data: [ERROR]"
            return
        try:
            async for line in conn.lines():
                yield line
        finally:
            await self.pool.checkin(conn)

    async def stream_usage(self, body: Dict[str, Any], stop: str) -> int:
        conn = await self._begin(body)  # leak: the stop line returns from the loop without a checkin
        if conn is None:
            return 0
        count = 0
        async for line in conn.lines():
            if line == stop:
                return count
            count += 1
        await self.pool.checkin(conn)
        return count

    async def open_stream(self, sid: str, body: Dict[str, Any]) -> bool:
        conn = await self._begin(body)  # clean: kept under sid, close_stream() checks it in
        if conn is None:
            return False
        stale = self.streams.pop(sid, None)
        self.streams[sid] = conn
        if stale is not None:
            await self.pool.discard(stale)
        return True

    async def close_stream(self, sid: str) -> None:
        conn = self.streams.pop(sid, None)
        if conn is not None:
            await self.pool.checkin(conn)

    # -- sticky sessions -----------------------------------------------

    async def sticky_conn(self, user: str, host: str) -> Upstream:
        conn = self.sticky.get(user)
        if conn is None or conn.broken:
            conn = await self.pool.checkout(host)  # leak: a broken sticky connection is replaced unreturned
            self.sticky[user] = conn
        return conn

    async def sticky_call(self, user: str, host: str, body: Dict[str, Any]) -> int:
        conn = await self.sticky_conn(user, host)  # clean: owned by the sticky table, not by this call
        status = await conn.post("/v1/chat/completions", body)
        if status >= 500:
            conn.broken = True
        return status

    async def logout(self, user: str) -> None:
        conn = self.sticky.pop(user, None)
        if conn is not None:
            await self.pool.checkin(conn)

    async def shutdown(self) -> None:
        for sid in list(self.streams):
            await self.close_stream(sid)
        for user in list(self.sticky):
            await self.logout(user)
