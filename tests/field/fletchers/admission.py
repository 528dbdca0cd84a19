"""Async admission control of the HTTP front end: token permits and tenant quotas."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


@dataclass
class Permit:
    tokens: int
    issued: float = field(default_factory=time.monotonic)


@dataclass
class ChatRequest:
    rid: str
    tenant: str
    prompt: str
    max_tokens: int = 64
    permit: Optional[Permit] = None
    cancelled: bool = False


class PermitPool:
    """Budget in tokens; waiters are woken in any order."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._cond = asyncio.Condition()

    async def admit(self, tokens: int) -> Permit:
        async with self._cond:
            await self._cond.wait_for(lambda: self._left >= tokens)
            self._left -= tokens
        return Permit(tokens)

    def try_admit(self, tokens: int) -> Optional[Permit]:
        if self._left < tokens:
            return None
        self._left -= tokens
        return Permit(tokens)

    async def dismiss(self, permit: Permit) -> None:
        async with self._cond:
            self._left += permit.tokens
            self._cond.notify_all()

    @property
    def left(self) -> int:
        return self._left


class TenantQuota:

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._live: Dict[str, int] = defaultdict(int)

    def enter(self, tenant: str) -> bool:
        if self._live[tenant] >= self.limit:
            return False
        self._live[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        self._live[tenant] -= 1


class FrontEnd:

    def __init__(self, permits: PermitPool, quota: TenantQuota, encoders: int = 2) -> None:
        self.permits = permits
        self.quota = quota
        self._encode_sem = asyncio.Semaphore(encoders)
        self._tasks: Set[asyncio.Task] = set()
        self._parked: Dict[str, ChatRequest] = {}

    def _cost(self, req: ChatRequest) -> int:
        return len(req.prompt.split()) + req.max_tokens

    # -- unary ---------------------------------------------------------

    async def complete(self, req: ChatRequest) -> str:
        permit = await self.permits.admit(self._cost(req))  # clean: finally
        try:
            return await self._generate(req)
        finally:
            await self.permits.dismiss(permit)

    async def complete_quota(self, req: ChatRequest) -> Optional[str]:
        if not self.quota.enter(req.tenant):  # leak: the count stays up when there is no permit
            return None
        permit = self.permits.try_admit(self._cost(req))  # clean: finally
        if permit is None:
            return None
        try:
            return await self._generate(req)
        finally:
            await self.permits.dismiss(permit)
            self.quota.leave(req.tenant)

    async def complete_metered(self, req: ChatRequest) -> Optional[str]:
        if not self.quota.enter(req.tenant):  # clean: near miss, every way past the test runs into the outer finally
            return None
        try:
            permit = self.permits.try_admit(self._cost(req))  # clean: inner finally
            if permit is None:
                return None
            try:
                return await self._generate(req)
            finally:
                await self.permits.dismiss(permit)
        finally:
            self.quota.leave(req.tenant)

    async def complete_with_timeout(self, req: ChatRequest, timeout: float) -> Optional[str]:
        permit = await self.permits.admit(self._cost(req))  # leak: the timeout is survived and returns None past the dismiss
        try:
            text = await asyncio.wait_for(self._generate(req), timeout)
        except asyncio.TimeoutError:
            logger.info("%s timed out", req.rid)
            return None
        await self.permits.dismiss(permit)
        return text

    # -- tasks ---------------------------------------------------------

    async def submit(self, req: ChatRequest) -> asyncio.Task:
        permit = await self.permits.admit(self._cost(req))  # clean: near miss, the task owns it and dismisses in its finally
        task = asyncio.create_task(self._run(req, permit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, req: ChatRequest, permit: Permit) -> str:
        try:
            return await self._generate(req)
        finally:
            await self.permits.dismiss(permit)

    async def submit_batch(self, reqs: List[ChatRequest]) -> List[asyncio.Task]:
        tasks = []
        for req in reqs:
            req.permit = await self.permits.admit(self._cost(req))  # leak: the task of a cancelled request returns before the dismiss
            tasks.append(asyncio.create_task(self._run_batched(req)))
        return tasks

    async def _run_batched(self, req: ChatRequest) -> str:
        await asyncio.sleep(0)
        if req.cancelled:
            logger.debug("%s cancelled before start", req.rid)
            return ""
        text = await self._generate(req)
        await self.permits.dismiss(req.permit)
        req.permit = None
        return text

    # -- parking -------------------------------------------------------

    async def park(self, req: ChatRequest) -> bool:
        if req.rid in self._parked:
            return False
        req.permit = self.permits.try_admit(self._cost(req))  # clean: near miss, moved with the request, resume() and sweep() dismiss it
        if req.permit is None:
            return False
        self._parked[req.rid] = req
        return True

    async def resume(self, rid: str) -> Optional[str]:
        req = self._parked.pop(rid, None)
        if req is None:
            return None
        try:
            return await self._generate(req)
        finally:
            permit, req.permit = req.permit, None
            await self.permits.dismiss(permit)

    async def sweep(self) -> None:
        for rid in list(self._parked):
            req = self._parked.pop(rid)
            await self.permits.dismiss(req.permit)

    # -- multimodal ----------------------------------------------------

    async def encode(self, images: List[bytes]) -> List[int]:
        out: List[int] = []
        for img in images:
            await self._encode_sem.acquire()  # leak: continue on an empty image skips the release
            if not img:
                continue
            out.append(await self._encode_one(img))
            self._encode_sem.release()
        return out

    async def encode_bounded(self, img: bytes) -> Optional[int]:
        if self._encode_sem.locked():
            return None
        await self._encode_sem.acquire()  # clean: finally
        try:
            return await self._encode_one(img)
        finally:
            self._encode_sem.release()

    async def stream(self, req: ChatRequest) -> AsyncIterator[str]:
        permit = await self.permits.admit(self._cost(req))  # clean: near miss, dismissed when the consumer closes the generator
        try:
            for word in (await self._generate(req)).split():
                yield word
        finally:
            await self.permits.dismiss(permit)

    async def _encode_one(self, img: bytes) -> int:
        await asyncio.sleep(0)
        return len(img)

    async def _generate(self, req: ChatRequest) -> str:
        await asyncio.sleep(0)
        return " ".join(reversed(req.prompt.split()))
