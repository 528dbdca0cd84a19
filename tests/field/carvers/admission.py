"""Admission control for the completion endpoint (asyncio)."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import AsyncIterator, Deque, Dict, List, Optional, Set

logger = logging.getLogger("admission")


class PermitPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.available = total
        self._waiters: Deque[asyncio.Future] = deque()

    async def acquire(self) -> None:
        while self.available == 0:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        self.available -= 1

    def try_acquire(self) -> bool:
        if self.available == 0:
            return False
        self.available -= 1
        return True

    def release(self) -> None:
        self.available += 1
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break

    async def __aenter__(self) -> "PermitPool":
        await self.acquire()  # clean: released in __aexit__
        return self

    async def __aexit__(self, *exc) -> None:
        self.release()


@dataclass
class Completion:
    request_id: str
    prompt: str
    max_tokens: int = 16
    priority: int = 0
    holds_permit: bool = False
    tokens: List[str] = field(default_factory=list)


class BadRequest(ValueError):
    pass


class Backend:
    async def generate(self, req: Completion) -> List[str]:
        await asyncio.sleep(0)
        if "!" in req.prompt:
            raise ConnectionError("engine went away")
        return req.prompt.split()[: req.max_tokens]


class AdmissionController:
    def __init__(self, backend: Backend, concurrency: int = 4, uploads: int = 2) -> None:
        self.backend = backend
        self.slots = PermitPool(concurrency)
        self.uploads = PermitPool(uploads)
        self.active: Dict[str, Completion] = {}
        self.uploading: Dict[str, Completion] = {}
        self.tasks: Set[asyncio.Task] = set()

    async def complete(self, req: Completion) -> List[str]:
        await self.slots.acquire()  # clean: finally
        try:
            return await self.backend.generate(req)
        finally:
            self.slots.release()

    async def complete_checked(self, req: Completion) -> Optional[List[str]]:
        await self.slots.acquire()  # leak: an empty prompt returns before the try
        if not req.prompt.strip():
            logger.info("rejecting empty prompt %s", req.request_id)
            return None
        try:
            return await self.backend.generate(req)
        finally:
            self.slots.release()

    async def complete_or_none(self, req: Completion) -> Optional[List[str]]:
        await self.slots.acquire()  # leak: ConnectionError is caught and the permit stays taken
        try:
            tokens = await self.backend.generate(req)
        except ConnectionError:
            logger.warning("backend lost for %s", req.request_id)
            return None
        self.slots.release()
        return tokens

    async def complete_retrying(self, req: Completion, attempts: int = 3) -> Optional[List[str]]:
        for attempt in range(attempts):
            await self.slots.acquire()  # leak: each failed attempt keeps its permit
            try:
                tokens = await self.backend.generate(req)
                self.slots.release()
                return tokens
            except ConnectionError:
                await asyncio.sleep(0.001 * 2 ** attempt)
        return None

    async def complete_backoff(self, req: Completion, attempts: int = 3) -> Optional[List[str]]:
        delay = 0.001
        for _ in range(attempts):
            await self.slots.acquire()  # clean: near miss, else/except both release
            try:
                tokens = await self.backend.generate(req)
            except ConnectionError:
                self.slots.release()
                await asyncio.sleep(delay)
                delay *= 2
            else:
                self.slots.release()
                return tokens
        return None

    def try_complete_nowait(self, req: Completion) -> bool:
        if not self.slots.try_acquire():  # clean: near miss, the task's callback releases
            return False
        task = asyncio.get_running_loop().create_task(self.backend.generate(req))
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return True

    def _finished(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self.slots.release()
        if not task.cancelled() and task.exception() is not None:
            logger.warning("background completion failed: %r", task.exception())

    def fire_and_forget(self, req: Completion) -> bool:
        if not self.slots.try_acquire():  # leak: the callback only drops the task from the set
            return False
        task = asyncio.get_running_loop().create_task(self.backend.generate(req))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def admit(self, req: Completion) -> bool:
        if req.request_id in self.active:
            return False
        if req.priority == 0:
            await self.slots.acquire()  # clean: near miss, the request's flag makes finish release
            req.holds_permit = True
        self.active[req.request_id] = req
        return req.holds_permit

    def finish(self, request_id: str) -> None:
        req = self.active.pop(request_id, None)
        if req is not None and req.holds_permit:
            req.holds_permit = False
            self.slots.release()

    def admit_upload(self, req: Completion) -> bool:
        if req.request_id in self.uploading:
            return False
        if not self.slots.try_acquire():  # leak: kept when there is no upload permit
            return False
        if not self.uploads.try_acquire():  # clean: finish_upload releases it
            return False
        self.uploading[req.request_id] = req
        return True

    def finish_upload(self, request_id: str) -> None:
        if self.uploading.pop(request_id, None) is not None:
            self.uploads.release()
            self.slots.release()

    async def stream(self, req: Completion) -> AsyncIterator[str]:
        await self.slots.acquire()  # clean: finally, closing the generator runs it
        try:
            for token in await self.backend.generate(req):
                yield token
        finally:
            self.slots.release()

    async def stream_limited(self, req: Completion, limit: int) -> AsyncIterator[str]:
        await self.slots.acquire()  # leak: return at the limit skips the release
        sent = 0
        for token in await self.backend.generate(req):
            if sent == limit:
                return
            yield token
            sent += 1
        self.slots.release()

    async def drain(self, queue: "asyncio.Queue[Optional[Completion]]") -> int:
        served = 0
        while True:
            req = await queue.get()
            if req is None:
                break
            async with self.slots:  # clean: async with
                if req.max_tokens <= 0:
                    continue
                req.tokens = await self.backend.generate(req)
                served += 1
        return served
