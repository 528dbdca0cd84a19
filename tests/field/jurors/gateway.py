"""Async front door for several OpenAI-compatible backends."""
from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


class UpstreamError(Exception):
    pass


@dataclass(eq=False)
class Permit:
    tenant: str


class TenantLimiter:
    def __init__(self, per_tenant: int) -> None:
        self._per_tenant = per_tenant
        self._used: dict[str, int] = defaultdict(int)
        self._cond = asyncio.Condition()

    async def acquire(self, tenant: str) -> Permit:
        async with self._cond:
            await self._cond.wait_for(lambda: self._used[tenant] < self._per_tenant)
            self._used[tenant] += 1
            return Permit(tenant)

    def try_acquire(self, tenant: str) -> Permit | None:
        if self._used[tenant] >= self._per_tenant:
            return None
        self._used[tenant] += 1
        return Permit(tenant)

    async def release(self, permit: Permit) -> None:
        async with self._cond:
            self._used[permit.tenant] -= 1
            self._cond.notify_all()


class Session:
    def __init__(self, backend: str) -> None:
        self.backend = backend

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(self.backend, 8000)  # clean: the writer is closed in finally
        try:
            writer.write(f"{path} {body}\n".encode())
            await writer.drain()
            line = await reader.readline()
            if not line:
                raise UpstreamError(self.backend)
            return {"text": line.decode()}
        finally:
            writer.close()

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[str | None]:
        for _ in range(body.get("max_tokens", 16)):
            yield (await self.post(path, body)).get("text")
        yield None


class BackendPool:
    def __init__(self, backends: list[str], size: int) -> None:
        self._idle: dict[str, asyncio.Queue[Session]] = {}
        for backend in backends:
            self._idle[backend] = asyncio.Queue()
            for _ in range(size):
                self._idle[backend].put_nowait(Session(backend))

    async def checkout(self, backend: str) -> Session:
        return await self._idle[backend].get()

    def checkin(self, session: Session) -> None:
        self._idle[session.backend].put_nowait(session)

    def discard(self, session: Session) -> None:
        self._idle[session.backend].put_nowait(Session(session.backend))


@dataclass
class Gateway:
    pool: BackendPool
    limiter: TenantLimiter
    routes: dict[str, list[str]]
    live: dict[str, Permit] = field(default_factory=dict)
    tasks: set[asyncio.Task] = field(default_factory=set)

    async def complete(self, tenant: str, model: str, body: dict[str, Any]) -> dict[str, Any]:
        permit = await self.limiter.acquire(tenant)  # leak: an unknown model returns 404 before the try that releases
        backends = self.routes.get(model)
        if not backends:
            return {"status": 404}
        try:
            session = await self.pool.checkout(backends[0])  # clean: checked in by the inner finally
            try:
                return await session.post("/v1/completions", body)
            finally:
                self.pool.checkin(session)
        finally:
            await self.limiter.release(permit)

    async def embeddings(self, tenant: str, backend: str, body: dict[str, Any]) -> dict[str, Any]:
        permit = self.limiter.try_acquire(tenant)  # clean: near miss, None is a 429 and the permit is released on both later ways
        if permit is None:
            return {"status": 429}
        session = await self.pool.checkout(backend)  # leak: the UpstreamError branch releases the permit and forgets the session
        try:
            out = await session.post("/v1/embeddings", body)
        except UpstreamError:
            await self.limiter.release(permit)
            return {"status": 502}
        self.pool.checkin(session)
        await self.limiter.release(permit)
        return out

    async def stream(self, backend: str, body: dict[str, Any]) -> AsyncIterator[str]:
        session = await self.pool.checkout(backend)  # clean: near miss, the early return in the loop passes the finally
        try:
            async for chunk in session.events("/v1/completions", body):
                if chunk is None:
                    return
                yield chunk
        finally:
            self.pool.checkin(session)

    async def stream_chat(self, backend: str, body: dict[str, Any]) -> AsyncIterator[str]:
        session = await self.pool.checkout(backend)  # leak: the end-of-stream marker returns from the generator before checkin
        async for chunk in session.events("/v1/chat/completions", body):
            if chunk is None:
                return
            yield chunk
        self.pool.checkin(session)

    async def hedge(self, primary: str, backup: str, body: dict[str, Any]) -> dict[str, Any]:
        first = await self.pool.checkout(primary)  # leak: when the backup wins the primary's session is not checked in
        second = await self.pool.checkout(backup)  # clean: near miss, checked in on either outcome
        race = {
            asyncio.create_task(first.post("/v1/completions", body)): first,
            asyncio.create_task(second.post("/v1/completions", body)): second,
        }
        done, pending = await asyncio.wait(race, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        winner = race[done.pop()]
        self.pool.checkin(second)
        if winner is first:
            self.pool.checkin(first)
        return {"status": 200, "backend": winner.backend}

    async def _send(self, backend: str, body: dict[str, Any]) -> dict[str, Any]:
        session = await self.pool.checkout(backend)  # clean: a cancelled sender gets through the finally as well
        try:
            return await session.post("/v1/completions", body)
        except UpstreamError:
            return {"status": 502}
        finally:
            self.pool.checkin(session)

    async def fan_out(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self._send(b, body) for b in self.routes.get("*", [])))

    async def probe(self, backend: str) -> bool:
        session = await self.pool.checkout(backend)  # clean: near miss, a broken one is discarded, which puts a replacement into the pool
        try:
            await session.post("/health", {})
        except (UpstreamError, OSError):
            self.pool.discard(session)
            return False
        self.pool.checkin(session)
        return True

    def submit(self, tenant: str, backend: str, body: dict[str, Any]) -> bool:
        permit = self.limiter.try_acquire(tenant)  # clean: near miss, moved into the task, which releases it in finally
        if permit is None:
            return False
        task = asyncio.create_task(self._background(permit, backend, body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def _background(self, permit: Permit, backend: str, body: dict[str, Any]) -> None:
        try:
            await self._send(backend, body)
        finally:
            await self.limiter.release(permit)

    async def connect(self, tenant: str, sid: str) -> None:
        self.live[sid] = await self.limiter.acquire(tenant)  # leak: a client that connects again with its sid overwrites the permit

    async def disconnect(self, sid: str) -> None:
        permit = self.live.pop(sid, None)
        if permit is not None:
            await self.limiter.release(permit)
