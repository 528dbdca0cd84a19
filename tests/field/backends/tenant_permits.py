"""Per-tenant concurrency permits for an asynchronous inference proxy."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Request:
    tenant: str
    prompt: str
    stream: bool = False
    priority: int = 0
    cached: str | None = None


class PermitBook:
    """Counts permits per tenant; try_take() answers at once, take() waits."""

    def __init__(self, per_tenant: int) -> None:
        self._per_tenant = per_tenant
        self._used: dict[str, int] = {}
        self._changed = asyncio.Condition()

    def try_take(self, tenant: str) -> bool:
        used = self._used.get(tenant, 0)
        if used >= self._per_tenant:
            return False
        self._used[tenant] = used + 1  # clean: the permit belongs to the caller
        return True

    async def take(self, tenant: str) -> None:
        async with self._changed:
            while self._used.get(tenant, 0) >= self._per_tenant:
                await self._changed.wait()
            self._used[tenant] = self._used.get(tenant, 0) + 1  # clean: the permit belongs to the caller

    async def give(self, tenant: str) -> None:
        async with self._changed:
            self._used[tenant] -= 1
            self._changed.notify_all()

    @asynccontextmanager
    async def permit(self, tenant: str):
        await self.take(tenant)  # clean: given back in the finally of the context manager
        try:
            yield
        finally:
            await self.give(tenant)


class Upstream:
    async def generate(self, prompt: str) -> dict:
        await asyncio.sleep(0)
        return {"ok": bool(prompt), "text": prompt[::-1]}

    async def stream(self, prompt: str):
        for word in prompt.split():
            await asyncio.sleep(0)
            yield word


class Proxy:
    def __init__(self, book: PermitBook, upstream: Upstream) -> None:
        self._book = book
        self._upstream = upstream
        self._streams: dict[int, str] = {}
        self._next = 0

    async def handle(self, req: Request) -> str:
        async with self._book.permit(req.tenant):  # clean: async with
            reply = await self._upstream.generate(req.prompt)
        return reply["text"]

    async def handle_fast(self, req: Request) -> str | None:
        if not self._book.try_take(req.tenant):  # leak: the cached answer returns without giving the permit back
            return None
        if req.cached is not None:
            return req.cached
        try:
            reply = await self._upstream.generate(req.prompt)
        finally:
            await self._book.give(req.tenant)
        return reply["text"]

    async def handle_batch(self, reqs: list[Request]) -> list[str]:
        out: list[str] = []
        for req in reqs:
            await self._book.take(req.tenant)  # leak: a reply that is not ok continues with the permit held
            reply = await self._upstream.generate(req.prompt)
            if not reply["ok"]:
                continue
            out.append(reply["text"])
            await self._book.give(req.tenant)
        return out

    async def handle_bulk(self, reqs: list[Request]) -> list[str]:
        out: list[str] = []
        for req in reqs:
            await self._book.take(req.tenant)  # clean: near miss, the continue runs through the finally
            try:
                reply = await self._upstream.generate(req.prompt)
                if not reply["ok"]:
                    continue
                out.append(reply["text"])
            finally:
                await self._book.give(req.tenant)
        return out

    async def open_stream(self, req: Request) -> int | None:
        if not self._book.try_take(req.tenant):  # clean: tabled by stream id, close_stream gives it back
            return None
        self._next += 1
        self._streams[self._next] = req.tenant
        return self._next

    async def close_stream(self, stream_id: int) -> None:
        tenant = self._streams.pop(stream_id, None)
        if tenant is not None:
            await self._book.give(tenant)

    async def relay(self, req: Request, limit: int):
        await self._book.take(req.tenant)  # leak: reaching the word limit returns before the permit is given
        sent = 0
        async for word in self._upstream.stream(req.prompt):
            if sent >= limit:
                return
            sent += 1
            yield word
        await self._book.give(req.tenant)


class Dispatcher:
    def __init__(self, book: PermitBook, upstream: Upstream) -> None:
        self._book = book
        self._upstream = upstream
        self.bypass_priority = 9

    async def submit(self, req: Request) -> asyncio.Task | None:
        if not self._book.try_take(req.tenant):  # clean: near miss, the task gives the permit back
            return None
        return asyncio.create_task(self._run(req))

    async def _run(self, req: Request) -> str:
        try:
            return (await self._upstream.generate(req.prompt))["text"]
        finally:
            await self._book.give(req.tenant)

    async def run_weighted(self, req: Request) -> str:
        if req.priority < self.bypass_priority:
            await self._book.take(req.tenant)  # leak: streaming requests of low priority are not covered by the release guard
        reply = await self._upstream.generate(req.prompt)
        if req.priority < self.bypass_priority and not req.stream:
            await self._book.give(req.tenant)
        return reply["text"]

    async def run_guarded(self, req: Request) -> str:
        limited = req.priority < self.bypass_priority
        if limited:
            await self._book.take(req.tenant)  # clean: near miss, the same local flag guards the release
        try:
            return (await self._upstream.generate(req.prompt))["text"]
        finally:
            if limited:
                await self._book.give(req.tenant)
