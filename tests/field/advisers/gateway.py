"""OpenAI-compatible gateway: tenant permits, backend leases and streaming sessions."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, AsyncIterator

logger = logging.getLogger("gateway")


class BackendError(RuntimeError):
    pass


@dataclass
class Backend:
    url: str
    healthy: bool = True
    inflight: int = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not self.healthy:
            raise BackendError(self.url)
        await asyncio.sleep(0)
        return {"path": path, "model": body.get("model"), "text": ""}

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for word in str(body.get("prompt", "")).split():
            await asyncio.sleep(0)
            yield word


class BackendRouter:
    def __init__(self, urls: list[str], per_backend: int) -> None:
        self.per_backend = per_backend
        self.backends = [Backend(u) for u in urls]

    def lease(self, exclude: set[str] = frozenset()) -> Backend | None:
        ready = [b for b in self.backends if b.healthy and b.inflight < self.per_backend and b.url not in exclude]
        if not ready:
            return None
        best = min(ready, key=lambda b: b.inflight)
        best.inflight += 1
        return best

    def unlease(self, backend: Backend) -> None:
        backend.inflight -= 1


class TenantLimiter:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._used: dict[str, int] = defaultdict(int)

    def try_enter(self, tenant: str) -> bool:
        if self._used[tenant] >= self.per_tenant:
            return False
        self._used[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        self._used[tenant] -= 1


@dataclass
class StreamSession:
    sid: str
    backend: Backend
    tenant: str
    opened: float = field(default_factory=time.monotonic)
    backlog: deque[str] = field(default_factory=deque)


class Gateway:
    def __init__(self, router: BackendRouter, limiter: TenantLimiter) -> None:
        self.router = router
        self.limiter = limiter
        self.sessions: dict[str, StreamSession] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.sticky: dict[str, Backend] = {}

    async def completions(self, tenant: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.limiter.try_enter(tenant):  # clean: near miss, the outer finally leaves on all ways
            return 429, None
        try:
            backend = self.router.lease()  # clean: unleased in the inner finally
            if backend is None:
                return 503, None
            try:
                return 200, await backend.post("/v1/completions", body)
            except BackendError:
                backend.healthy = False
                return 502, None
            finally:
                self.router.unlease(backend)
        finally:
            self.limiter.leave(tenant)

    async def embeddings(self, tenant: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.limiter.try_enter(tenant):  # leak: the 503 return comes before the try whose finally leaves
            return 429, None
        backend = self.router.lease()  # clean: unleased in the finally
        if backend is None:
            return 503, None
        try:
            return 200, await backend.post("/v1/embeddings", body)
        except BackendError:
            return 502, None
        finally:
            self.router.unlease(backend)
            self.limiter.leave(tenant)

    async def with_failover(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        tried: set[str] = set()
        while True:
            backend = self.router.lease(tried)  # leak: a BackendError goes on to the next backend without unlease
            if backend is None:
                return None
            try:
                reply = await backend.post(path, body)
            except BackendError:
                tried.add(backend.url)
                continue
            self.router.unlease(backend)
            return reply

    def open_session(self, sid: str, tenant: str) -> StreamSession | None:
        if sid in self.sessions:
            return self.sessions[sid]
        backend = self.router.lease()  # clean: near miss, unleased if the tenant is at its limit, else owned by the session
        if backend is None:
            return None
        if not self.limiter.try_enter(tenant):  # leak: expire_sessions drops a session and unleases the backend only
            self.router.unlease(backend)
            return None
        session = StreamSession(sid, backend, tenant)
        self.sessions[sid] = session
        return session

    def close_session(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        self.router.unlease(session.backend)
        self.limiter.leave(session.tenant)

    def expire_sessions(self, max_age: float) -> int:
        now = time.monotonic()
        old = [s for s in self.sessions.values() if now - s.opened > max_age]
        for session in old:
            del self.sessions[session.sid]
            self.router.unlease(session.backend)
        return len(old)

    async def pump(self, sid: str, tenant: str, body: dict[str, Any]) -> AsyncIterator[str]:
        session = self.open_session(sid, tenant)  # clean: near miss, closed in the finally, also when the client goes away
        if session is None:
            return
        try:
            async for word in session.backend.stream(body):
                session.backlog.append(word)
                yield word
        except asyncio.CancelledError:
            logger.info("client of %s went away", sid)
            raise
        finally:
            self.close_session(sid)

    def pick_sticky(self, user: str) -> Backend | None:
        current = self.sticky.get(user)
        if current is not None and current.healthy:
            return current
        fresh = self.router.lease()  # leak: replaces an unhealthy backend in sticky, whose lease is not given back
        if fresh is not None:
            self.sticky[user] = fresh
        return fresh

    def forget_user(self, user: str) -> None:
        backend = self.sticky.pop(user, None)
        if backend is not None:
            self.router.unlease(backend)

    def submit_background(self, job: str, body: dict[str, Any]) -> bool:
        backend = self.router.lease()  # clean: near miss, the done callback unleases it, also after cancellation
        if backend is None:
            return False
        task = asyncio.create_task(backend.post("/v1/batch", body))
        task.add_done_callback(lambda _t: self.router.unlease(backend))
        self.tasks[job] = task
        return True

    def submit_warmup(self, model: str) -> bool:
        backend = self.router.lease()  # leak: the callback unleases only after success, a cancelled or failed warm-up keeps it
        if backend is None:
            return False

        def _done(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or task.exception() is not None:
                return
            self.router.unlease(backend)

        asyncio.create_task(backend.post("/warmup", {"model": model})).add_done_callback(_done)
        return True
