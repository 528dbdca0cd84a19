"""Async gateway in front of the embedding workers."""
import asyncio
import logging
import time
from collections import deque
from typing import Any, Awaitable, Callable, Optional

logger = logging.getLogger("gateway.embed")

Dial = Callable[[str], Awaitable[Any]]


class PermitBank:
    """Per-tenant concurrency permits."""

    def __init__(self, per_tenant: int) -> None:
        self._per_tenant = per_tenant
        self._used: dict[str, int] = {}
        self._changed = asyncio.Condition()

    def try_acquire(self, tenant: str) -> bool:
        used = self._used.get(tenant, 0)
        if used >= self._per_tenant:
            return False
        self._used[tenant] = used + 1
        return True

    async def acquire(self, tenant: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._used.get(tenant, 0) < self._per_tenant)
            self._used[tenant] = self._used.get(tenant, 0) + 1

    async def release(self, tenant: str) -> None:
        async with self._changed:
            self._used[tenant] -= 1
            self._changed.notify_all()


class UpstreamPool:
    def __init__(self, dial: Dial, limit: int) -> None:
        self._dial = dial
        self._limit = limit
        self._open = 0
        self._idle: dict[str, deque[Any]] = {}

    async def checkout(self, host: str) -> Optional[Any]:
        idle = self._idle.setdefault(host, deque())
        if idle:
            return idle.pop()
        if self._open >= self._limit:
            return None
        self._open += 1
        try:
            return await self._dial(host)
        except OSError:
            self._open -= 1
            return None

    def checkin(self, host: str, conn: Any) -> None:
        self._idle.setdefault(host, deque()).append(conn)

    def discard(self, conn: Any) -> None:
        self._open -= 1
        conn.close()


class TenantSlot:
    """``async with TenantSlot(...) as slot`` holds one permit for the duration of a request."""

    def __init__(self, bank: PermitBank, tenant: str) -> None:
        self.bank = bank
        self.tenant = tenant
        self.started = 0.0

    async def __aenter__(self) -> "TenantSlot":
        await self.bank.acquire(self.tenant)  # leak: __aexit__ returns before the release when the body timed out
        self.started = time.monotonic()
        return self

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if exc_type is asyncio.TimeoutError:
            logger.warning("tenant %s: timeout after %.2fs", self.tenant, time.monotonic() - self.started)
            return True
        await self.bank.release(self.tenant)
        return False


class PinnedUpstream:
    """One connection kept for all the pieces of a long document."""

    def __init__(self, pool: UpstreamPool, host: str) -> None:
        self.pool = pool
        self.host = host
        self.conn: Optional[Any] = None

    async def __aenter__(self) -> "PinnedUpstream":
        self.conn = await self.pool.checkout(self.host)  # clean: near miss, __aexit__ gives it back or discards it by the kind of exit
        return self

    async def __aexit__(self, exc_type, exc, tb) -> None:
        conn, self.conn = self.conn, None
        if conn is None:
            return
        if exc_type is None:
            self.pool.checkin(self.host, conn)
        else:
            self.pool.discard(conn)


class EmbedGateway:
    def __init__(self, bank: PermitBank, pool: UpstreamPool, hosts: list[str]) -> None:
        self.bank = bank
        self.pool = pool
        self.hosts = hosts
        self._rr = 0

    def _pick(self) -> str:
        self._rr = (self._rr + 1) % len(self.hosts)
        return self.hosts[self._rr]

    async def embed(self, tenant: str, texts: list[str]) -> Optional[list[list[float]]]:
        async with TenantSlot(self.bank, tenant):
            return await asyncio.wait_for(self._call(texts), 10.0)
        return None

    async def _call(self, texts: list[str]) -> Optional[list[list[float]]]:
        host = self._pick()
        conn = await self.pool.checkout(host)  # leak: a worker that answers 503 leads to None without checkin or discard
        if conn is None:
            return None
        reply = await conn.request("embed", texts)
        if reply.status == 503:
            logger.info("%s is saturated", host)
            return None
        self.pool.checkin(host, conn)
        return reply.vectors

    async def embed_document(self, pieces: list[str]) -> list[list[float]]:
        out: list[list[float]] = []
        async with PinnedUpstream(self.pool, self._pick()) as up:
            if up.conn is None:
                return out
            for piece in pieces:
                reply = await up.conn.request("embed", [piece])
                out.extend(reply.vectors)
        return out

    async def try_embed(self, tenant: str, texts: list[str]) -> Optional[list[list[float]]]:
        if not self.bank.try_acquire(tenant):  # clean: near miss, refusal takes nothing and the finally releases
            return None
        try:
            return await self._call(texts)
        except ConnectionError:
            return None
        finally:
            await self.bank.release(tenant)

    async def rerank(self, tenant: str, query: str, docs: list[str]) -> list[int]:
        if not self.bank.try_acquire(tenant):  # leak: an empty document list returns before anything releases
            return []
        if not docs:
            return []
        try:
            vecs = await self._call([query, *docs])
        finally:
            await self.bank.release(tenant)
        if vecs is None:
            return list(range(len(docs)))
        q = vecs[0]
        score = [sum(a * b for a, b in zip(q, v)) for v in vecs[1:]]
        return sorted(range(len(docs)), key=score.__getitem__, reverse=True)

    async def with_retry(self, texts: list[str], attempts: int = 3) -> Optional[list[list[float]]]:
        for _ in range(attempts):
            host = self._pick()
            conn = await self.pool.checkout(host)  # clean: near miss, each attempt ends in checkin or discard
            if conn is None:
                continue
            try:
                reply = await conn.request("embed", texts)
            except ConnectionError:
                self.pool.discard(conn)
                continue
            self.pool.checkin(host, conn)
            if reply.status == 200:
                return reply.vectors
        return None

    async def worker(self, inbox: asyncio.Queue, tenant: str) -> None:
        while True:
            item = await inbox.get()
            if item is None:
                return
            await self.bank.acquire(tenant)  # clean: near miss, released also when the call is cancelled
            try:
                item.set_result(await self._call(item.texts))
            except asyncio.CancelledError:
                item.cancel()
                raise
            finally:
                await self.bank.release(tenant)
