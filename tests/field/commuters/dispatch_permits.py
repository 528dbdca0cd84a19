"""Asyncio dispatch with permits: global, per model and per tenant."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Optional

log = logging.getLogger("dispatch")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class Permit:
    owner: "PermitGate"
    model: str
    weight: int = 1


@dataclass
class Job:
    payload: dict[str, Any]
    permit: Optional[Permit] = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class PermitGate:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._in_use = 0
        self._changed = asyncio.Condition()

    async def obtain(self, model: str, weight: int = 1) -> Permit:
        async with self._changed:  # clean: async with
            while self._in_use + weight > self._capacity:
                await self._changed.wait()
            self._in_use += weight  # clean: carried by the permit
        return Permit(self, model, weight)

    def try_obtain(self, model: str, weight: int = 1) -> Optional[Permit]:
        if self._in_use + weight > self._capacity:
            return None
        self._in_use += weight  # clean: carried by the permit
        return Permit(self, model, weight)

    async def relinquish(self, permit: Permit) -> None:
        async with self._changed:  # clean: async with
            self._in_use -= permit.weight
            self._changed.notify_all()


class Dispatcher:
    def __init__(self, gate: PermitGate, handlers: dict[str, Handler]) -> None:
        self.gate = gate
        self.handlers = handlers
        self.tasks: set[asyncio.Task[None]] = set()
        self.uploads = asyncio.Semaphore(4)

    async def call(self, payload: dict[str, Any]) -> dict[str, Any]:
        permit = await self.gate.obtain(payload["model"])  # leak: an unknown model answers 404 with the permit in hand
        handler = self.handlers.get(permit.model)
        if handler is None:
            return {"error": "unknown model", "status": 404}
        try:
            return await handler(payload)
        finally:
            await self.gate.relinquish(permit)

    async def call_checked(self, payload: dict[str, Any]) -> dict[str, Any]:
        handler = self.handlers.get(payload["model"])
        if handler is None:
            return {"error": "unknown model", "status": 404}
        permit = await self.gate.obtain(payload["model"])  # clean: near miss, every return after it is under the finally
        try:
            if payload.get("dry_run"):
                return {"status": 200}
            return await handler(payload)
        except asyncio.TimeoutError:
            return {"status": 504}
        finally:
            await self.gate.relinquish(permit)

    async def _run(self, job: Job) -> None:
        try:
            job.payload = await self.handlers[job.payload["model"]](job.payload)
        finally:
            if job.permit is not None:
                await self.gate.relinquish(job.permit)
            job.done.set()

    async def spawn(self, payload: dict[str, Any]) -> Optional[Job]:
        permit = self.gate.try_obtain(payload["model"])  # clean: moved into the job, _run relinquishes it
        if permit is None:
            return None
        job = Job(payload, permit)
        task = asyncio.create_task(self._run(job))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return job

    async def spawn_batch(self, payloads: list[dict[str, Any]]) -> list[Job]:
        jobs: list[Job] = []
        for payload in payloads:
            permit = await self.gate.obtain(payload["model"], len(payload["inputs"]))  # leak: a model without handler is skipped after obtaining
            if payload["model"] not in self.handlers:
                log.warning("skip %s", payload["model"])
                continue
            job = Job(payload, permit)
            self.tasks.add(asyncio.create_task(self._run(job)))
            jobs.append(job)
        return jobs

    async def upload(self, blob: bytes, put: Callable[[bytes], Awaitable[bool]]) -> bool:
        await self.uploads.acquire()  # clean: near miss, the handler releases too
        try:
            ok = await put(blob)
        except ConnectionError:
            self.uploads.release()
            return False
        self.uploads.release()
        return ok

    async def upload_with_retry(self, blob: bytes, put: Callable[[bytes], Awaitable[bool]]) -> bool:
        for attempt in range(5):
            await self.uploads.acquire()  # leak: success returns without the release that failure does
            if await put(blob):
                return True
            self.uploads.release()
            await asyncio.sleep(2 ** attempt)
        return False

    async def upload_many(self, blobs: list[bytes], put: Callable[[bytes], Awaitable[bool]]) -> int:
        stored = 0
        for blob in blobs:
            async with self.uploads:  # clean: async with
                if not blob:
                    continue
                stored += int(await put(blob))
        return stored


async def canary(gate: PermitGate, handler: Handler, payload: dict[str, Any]) -> bool:
    permit = gate.try_obtain("canary")  # leak: the timeout is caught and the permit forgotten
    if permit is None:
        return False
    try:
        await asyncio.wait_for(handler(payload), 2.0)
        await gate.relinquish(permit)
    except asyncio.TimeoutError:
        log.warning("canary timed out")
        return False
    return True
