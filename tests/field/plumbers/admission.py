"""Async front door: concurrency permits, token quotas and per-request tasks."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Awaitable, Callable, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


class EngineBusy(Exception):
    pass


class EngineDead(Exception):
    pass


@dataclass
class Incoming:
    rid: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    stream: bool = False


class TokenQuota:
    """Per-tenant number of tokens that may be in flight."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used: Dict[str, int] = {}

    def reserve(self, tenant: str, n: int) -> bool:
        used = self._used.get(tenant, 0)
        if used + n > self.limit:
            return False
        self._used[tenant] = used + n
        return True

    def unreserve(self, tenant: str, n: int) -> None:
        self._used[tenant] -= n


class Gate:
    """Wraps a semaphore so that waiters can be counted and bounded."""

    def __init__(self, permits: int, max_waiters: int) -> None:
        self._sem = asyncio.Semaphore(permits)
        self._max_waiters = max_waiters
        self.waiters = 0

    async def enter(self) -> bool:
        if self.waiters >= self._max_waiters:
            return False
        self.waiters += 1
        try:
            await self._sem.acquire()  # clean: near miss, handed to the caller, who leaves
        finally:
            self.waiters -= 1
        return True

    def leave(self) -> None:
        self._sem.release()


Generate = Callable[[Incoming], Awaitable[str]]


class FrontDoor:
    def __init__(self, gate: Gate, quota: TokenQuota, generate: Generate) -> None:
        self.gate = gate
        self.quota = quota
        self.generate = generate
        self.tasks: Set["asyncio.Task[str]"] = set()

    def _cost(self, req: Incoming) -> int:
        return req.prompt_tokens + req.max_tokens

    async def handle(self, req: Incoming) -> Optional[str]:
        if not await self.gate.enter():  # clean: left in finally
            return None
        try:
            cost = self._cost(req)
            if not self.quota.reserve(req.tenant, cost):  # clean: unreserved in the inner finally
                return None
            try:
                return await self.generate(req)
            except EngineBusy:
                return None
            finally:
                self.quota.unreserve(req.tenant, cost)
        finally:
            self.gate.leave()

    async def handle_simple(self, req: Incoming) -> Optional[str]:
        if not self.quota.reserve(req.tenant, self._cost(req)):  # leak: a closed gate returns without unreserving
            return None
        if not await self.gate.enter():  # clean: left in finally
            return None
        try:
            return await self.generate(req)
        finally:
            self.gate.leave()
            self.quota.unreserve(req.tenant, self._cost(req))

    async def handle_retry(self, req: Incoming, attempts: int) -> Optional[str]:
        for attempt in range(attempts):
            if not await self.gate.enter():  # leak: a busy engine goes to the next attempt with the permit kept
                await asyncio.sleep(0)
                continue
            try:
                text = await self.generate(req)
            except EngineBusy:
                await asyncio.sleep(0.001 * attempt)
                continue
            self.gate.leave()
            return text
        return None

    async def handle_retry_once_admitted(self, req: Incoming, attempts: int) -> Optional[str]:
        admitted = False
        try:
            for _ in range(attempts):
                if not admitted:
                    admitted = await self.gate.enter()  # clean: near miss, entered at most once, left under the same flag
                    if not admitted:
                        continue
                try:
                    return await self.generate(req)
                except EngineBusy:
                    await asyncio.sleep(0)
            return None
        finally:
            if admitted:
                self.gate.leave()

    async def _run(self, req: Incoming) -> str:
        try:
            return await self.generate(req)
        finally:
            self.gate.leave()

    async def spawn(self, req: Incoming) -> bool:
        if not await self.gate.enter():  # clean: near miss, the task leaves
            return False
        task = asyncio.create_task(self._run(req))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def spawn_metered(self, req: Incoming) -> bool:
        cost = self._cost(req)
        if not self.quota.reserve(req.tenant, cost):  # clean: near miss, the callback unreserves
            return False
        task = asyncio.ensure_future(self.generate(req))
        task.add_done_callback(lambda _t: self.quota.unreserve(req.tenant, cost))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        return True

    async def spawn_streaming(self, req: Incoming) -> bool:
        cost = self._cost(req)
        if not self.quota.reserve(req.tenant, cost):  # leak: the callback returns early for a failed task and does not unreserve
            return False

        def on_done(task: "asyncio.Future[str]") -> None:
            self.tasks.discard(task)
            if task.cancelled() or task.exception() is not None:
                logger.warning("request %s failed", req.rid)
                return
            self.quota.unreserve(req.tenant, cost)

        task = asyncio.ensure_future(self.generate(req))
        self.tasks.add(task)
        task.add_done_callback(on_done)
        return True

    async def handle_batch(self, reqs: List[Incoming]) -> List[str]:
        """All or nothing on quota, then in order."""
        held: List[Incoming] = []
        for req in reqs:
            if not self.quota.reserve(req.tenant, self._cost(req)):  # clean: near miss, rolled back on refusal, else undone after the batch
                for h in held:
                    self.quota.unreserve(h.tenant, self._cost(h))
                return []
            held.append(req)
        try:
            return [await self.generate(r) for r in reqs]
        finally:
            for h in held:
                self.quota.unreserve(h.tenant, self._cost(h))

    async def health(self, req: Incoming) -> bool:
        try:
            if not await asyncio.wait_for(self.gate.enter(), 1.0):  # leak: a dead engine is caught and answers False, the permit is kept
                return False
            await self.generate(req)
            self.gate.leave()
            return True
        except (asyncio.TimeoutError, EngineDead):
            return False
