"""Concurrency limits per tenant for the public API: permits, a middleware and a few endpoints."""
from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Optional


@dataclass
class Permit:
    tenant: str
    weight: int
    taken_at: float = field(default_factory=time.monotonic)


@dataclass
class Request:
    tenant: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    permit: Optional[Permit] = None
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class Response:
    status: int
    body: bytes = b""


class Limiter:
    """Every tenant has a number of units in use at most; admit() takes some, depart() returns them."""

    def __init__(self, default: int, overrides: Optional[dict[str, int]] = None) -> None:
        self.default = default
        self.overrides = overrides or {}
        self._used: dict[str, int] = {}
        self._changed = asyncio.Condition()

    def _limit(self, tenant: str) -> int:
        return self.overrides.get(tenant, self.default)

    def admit(self, tenant: str, weight: int = 1) -> Optional[Permit]:
        used = self._used.get(tenant, 0)
        if used + weight > self._limit(tenant):
            return None
        self._used[tenant] = used + weight
        return Permit(tenant, weight)

    async def admit_wait(self, tenant: str, weight: int = 1) -> Permit:
        while True:
            permit = self.admit(tenant, weight)  # clean: handed to the caller
            if permit is not None:
                return permit
            await asyncio.sleep(0.01)

    def depart(self, permit: Permit) -> None:
        self._used[permit.tenant] -= permit.weight

    def load(self, tenant: str) -> float:
        return self._used.get(tenant, 0) / self._limit(tenant)


Handler = Callable[[Request], Awaitable[Response]]


class Gate:
    """`async with Gate(...)`: waits for a permit, returns it at the end."""

    def __init__(self, limiter: Limiter, tenant: str, weight: int = 1) -> None:
        self.limiter = limiter
        self.tenant = tenant
        self.weight = weight
        self.permit: Optional[Permit] = None

    async def __aenter__(self) -> Permit:
        self.permit = await self.limiter.admit_wait(self.tenant, self.weight)  # clean: __aexit__ departs
        return self.permit

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if self.permit is not None:
            self.limiter.depart(self.permit)
            self.permit = None
        return False


class SoftGate:
    """Like Gate, but lets requests of a cancelled client end quietly."""

    def __init__(self, limiter: Limiter, tenant: str) -> None:
        self.limiter = limiter
        self.tenant = tenant
        self.quiet = 0
        self.permit: Optional[Permit] = None
        self.entered = 0.0

    async def __aenter__(self) -> "SoftGate":
        self.permit = await self.limiter.admit_wait(self.tenant)  # leak: __aexit__ returns early
        self.entered = time.monotonic()
        return self

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if time.monotonic() - self.entered < 0.001:
            self.quiet += 1
            return False
        self.limiter.depart(self.permit)
        return exc_type is asyncio.CancelledError


def limited(limiter: Limiter, weight: int = 1) -> Callable[[Handler], Handler]:
    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def inner(request: Request) -> Response:
            permit = limiter.admit(request.tenant, weight)  # clean: None means 429, else departed in finally
            if permit is None:
                return Response(429, b"slow down")
            try:
                return await handler(request)
            finally:
                limiter.depart(permit)
        return inner
    return decorate


def limited_unless_cached(limiter: Limiter, cache: dict[str, Response]) -> Callable[[Handler], Handler]:
    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def inner(request: Request) -> Response:
            permit = limiter.admit(request.tenant)  # leak: an answer from the cache returns without depart
            if permit is None:
                return Response(429)
            hit = cache.get(request.path)
            if hit is not None and hit.status == 200:
                return hit
            response = await handler(request)
            limiter.depart(permit)
            cache[request.path] = response
            return response
        return inner
    return decorate


class Middleware:
    """Attaches a permit to the request before routing; after() is called for every routed request."""

    def __init__(self, limiter: Limiter, routes: dict[str, Handler]) -> None:
        self.limiter = limiter
        self.routes = routes
        self.free_paths = {"/health", "/metrics"}

    def before(self, request: Request) -> Optional[Response]:
        if request.path in self.free_paths:
            return None
        request.permit = self.limiter.admit(request.tenant)  # clean: near miss, after() departs
        if request.permit is None:
            return Response(429)
        return None

    def after(self, request: Request) -> None:
        if request.permit is not None:
            self.limiter.depart(request.permit)
            request.permit = None

    async def __call__(self, request: Request) -> Response:
        refused = self.before(request)
        if refused is not None:
            return refused
        try:
            handler = self.routes.get(request.path)
            if handler is None:
                return Response(404)
            return await handler(request)
        finally:
            self.after(request)


class UploadEndpoint:
    """Uploads weigh by size; a token in state carries the permit between the two phases."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.pending: dict[str, Permit] = {}
        self.sizes: dict[str, int] = {}

    async def announce(self, request: Request) -> Response:
        size = int(request.headers.get("content-length", "0"))
        weight = 1 + size // 1_000_000
        permit = self.limiter.admit(request.tenant, weight)  # clean: complete, abandon depart
        if permit is None:
            return Response(429)
        token = f"{request.tenant}-{len(self.pending)}-{time.monotonic_ns()}"
        self.pending[token] = permit
        self.sizes[token] = size
        return Response(202, token.encode())

    async def complete(self, token: str, body: bytes) -> Response:
        permit = self.pending.pop(token, None)
        if permit is None:
            return Response(410)
        expected = self.sizes.pop(token)
        self.limiter.depart(permit)
        return Response(201 if len(body) == expected else 400)

    def abandon(self, token: str) -> None:
        self.sizes.pop(token, None)
        permit = self.pending.pop(token, None)
        if permit is not None:
            self.limiter.depart(permit)


class ExportEndpoint:
    """Exports run for minutes; a permit per export is held in `active` until it is collected."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.active: dict[int, tuple[Permit, float]] = {}
        self.results: dict[int, bytes] = {}
        self._next = 0

    def begin(self, tenant: str) -> Optional[int]:
        permit = self.limiter.admit(tenant, 4)  # leak: end() pops the entry and drops the permit
        if permit is None:
            return None
        self._next += 1
        self.active[self._next] = (permit, time.monotonic())
        return self._next

    def end(self, export_id: int, payload: bytes) -> float:
        permit, started = self.active.pop(export_id)
        self.results[export_id] = payload
        return (time.monotonic() - started) * permit.weight

    def collect(self, export_id: int) -> Optional[bytes]:
        return self.results.pop(export_id, None)


async def suggest(limiter: Limiter, request: Request, index: dict[str, bytes]) -> Response:
    prefix = request.body.decode()[:16]
    if limiter.load(request.tenant) > 0.9:
        return Response(204)
    async with Gate(limiter, request.tenant):  # clean: near miss, returning inside the block is fine
        found = index.get(prefix)
        if found is None:
            return Response(404)
        return Response(200, found)


async def upgrade(limiter: Limiter, request: Request) -> Response:
    """Trades a light permit for a heavy one when the body turns out to be large."""
    permit = limiter.admit(request.tenant, 1)  # leak: overwritten by the heavy permit, only that departs
    if permit is None:
        return Response(429)
    if len(request.body) > 65536:
        permit = await limiter.admit_wait(request.tenant, 8)  # clean: departed below
    digest = str(hash(request.body)).encode()
    limiter.depart(permit)
    return Response(200, digest)


async def exchange(limiter: Limiter, request: Request) -> Response:
    permit = limiter.admit(request.tenant, 1)  # clean: departed before it is replaced, or below
    if permit is None:
        return Response(429)
    if len(request.body) > 65536:
        limiter.depart(permit)
        permit = await limiter.admit_wait(request.tenant, 8)  # clean: departed below
    digest = str(hash(request.body)).encode()
    limiter.depart(permit)
    return Response(200, digest)


async def fan_out(limiter: Limiter, tenants: list[str], call: Callable[[str], Awaitable[int]]) -> list[int]:
    results = []
    for tenant in tenants:
        permit = await limiter.admit_wait(tenant)  # leak: break on a negative code leaves with the permit
        code = await call(tenant)
        if code < 0:
            break
        results.append(code)
        limiter.depart(permit)
    return results


async def fire_and_forget(limiter: Limiter, tenant: str, work: Callable[[], Awaitable[None]]) -> bool:
    permit = limiter.admit(tenant)  # clean: near miss, the task that gets it departs when it ends
    if permit is None:
        return False

    async def body() -> None:
        try:
            await work()
        finally:
            limiter.depart(permit)

    asyncio.get_running_loop().create_task(body())
    return True
