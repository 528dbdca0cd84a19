"""Admission control of the front end: how many requests may be in the engine."""
from __future__ import annotations

import asyncio
import collections
import time


class Permit:
    __slots__ = ("weight",)

    def __init__(self, weight):
        self.weight = weight


class PermitPool:
    def __init__(self, capacity):
        self._left = capacity
        self._wakeup = asyncio.Condition()

    def try_acquire(self, weight=1):
        if self._left < weight:
            return None
        self._left -= weight
        return Permit(weight)

    async def acquire(self, weight=1):
        async with self._wakeup:
            await self._wakeup.wait_for(lambda: self._left >= weight)
            self._left -= weight
        return Permit(weight)

    def release(self, permit):
        self._left += permit.weight

        async def wake():
            async with self._wakeup:
                self._wakeup.notify_all()

        asyncio.ensure_future(wake())


class AdmissionGate:
    def __init__(self, pool, engine):
        self.pool = pool
        self.engine = engine
        self.permits = {}

    async def submit(self, req):
        self.permits[req.rid] = await self.pool.acquire()  # leak: a disconnect pops the permit and throws it away
        await self.engine.enqueue(req)

    def on_finished(self, rid):
        permit = self.permits.pop(rid, None)
        if permit is not None:
            self.pool.release(permit)

    async def on_disconnect(self, rid):
        self.permits.pop(rid, None)
        await self.engine.abort(rid)


class StreamingCall:
    def __init__(self, pool, engine):
        self.pool = pool
        self.engine = engine

    async def chunks(self, req):
        permit = await self.pool.acquire(req.weight)  # clean: the finally of the generator releases it
        try:
            async for chunk in self.engine.generate(req):
                yield chunk
        finally:
            self.pool.release(permit)


class RetryingDispatcher:
    def __init__(self, pool, attempts=3):
        self.pool = pool
        self.attempts = attempts
        self.running = {}

    async def dispatch(self, req, worker):
        for attempt in range(self.attempts):
            permit = await self.pool.acquire()  # leak: a refused connection goes to the next attempt, which takes anew
            try:
                await worker.send(req)
            except ConnectionError:
                await asyncio.sleep(0.1 * 2 ** attempt)
                continue
            self.running[req.rid] = permit
            return True
        return False

    def done(self, rid):
        self.pool.release(self.running.pop(rid))


class DeadlineBatcher:
    def __init__(self, pool, run_batch):
        self.pool = pool
        self.run_batch = run_batch
        self.queue = collections.deque()

    def offer(self, req):
        permit = self.pool.try_acquire()  # leak: a request past its deadline is skipped by flush with its permit
        if permit is None:
            return False
        self.queue.append((req, permit))
        return True

    def flush(self):
        batch = []
        while self.queue:
            req, permit = self.queue.popleft()
            if req.deadline < time.monotonic():
                req.reject("deadline")
                continue
            batch.append((req, permit))
        if batch:
            self.run_batch([req for req, _ in batch])
        for _, permit in batch:
            self.pool.release(permit)


class TenantQuota:
    def __init__(self, shared, per_tenant):
        self.shared = shared
        self.per_tenant = per_tenant
        self.held = {}

    def admit(self, req):
        own = self.per_tenant[req.tenant].try_acquire()  # clean: near miss, given back when the shared pool refuses, else kept in the pair
        if own is None:
            return False
        common = self.shared.try_acquire()  # clean: kept in the pair that leave releases
        if common is None:
            self.per_tenant[req.tenant].release(own)
            return False
        self.held[req.rid] = (req.tenant, own, common)
        return True

    def leave(self, rid):
        tenant, own, common = self.held.pop(rid)
        self.per_tenant[tenant].release(own)
        self.shared.release(common)


class TokenBudget:
    def __init__(self, requests, tokens):
        self.requests = requests
        self.tokens = tokens
        self.request_permits = {}
        self.token_permits = {}

    def admit(self, req):
        slot = self.requests.try_acquire()  # clean: near miss, given back without budget, else leave releases it
        if slot is None:
            return False
        budget = self.tokens.try_acquire(req.max_tokens)  # leak: leave releases the request permit, the token permit stays in the table
        if budget is None:
            self.requests.release(slot)
            return False
        self.request_permits[req.rid] = slot
        self.token_permits[req.rid] = budget
        return True

    def leave(self, rid):
        self.requests.release(self.request_permits.pop(rid))


class DrainableQueue:
    def __init__(self, pool):
        self.pool = pool
        self.closing = False
        self.held = {}

    async def enter(self, rid):
        permit = await self.pool.acquire()  # leak: when closing was set during the wait, it returns without storing the permit
        if self.closing:
            return False
        self.held[rid] = permit
        return True

    def leave(self, rid):
        self.pool.release(self.held.pop(rid))

    async def drain(self):
        self.closing = True
        while self.held:
            await asyncio.sleep(0.05)


class BackgroundJobs:
    def __init__(self, pool):
        self.pool = pool
        self.tasks = set()

    async def spawn(self, coro):
        permit = await self.pool.acquire()  # clean: near miss, the done callback releases it however the task ends
        task = asyncio.create_task(coro)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: self.pool.release(permit))
