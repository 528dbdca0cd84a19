"""Asyncio gateway in front of the generation workers.

Per tenant a rate permit, per worker an in-flight slot, per websocket a session buffer.
"""
import asyncio
import contextlib
import json
import logging
from collections import defaultdict, deque

log = logging.getLogger("gateway")


class Throttled(Exception):
    pass


class WorkerGone(Exception):
    pass


class Permits:
    """Concurrency permits by tenant, built on one semaphore per tenant."""

    def __init__(self, per_tenant):
        self._per_tenant = per_tenant
        self._sems = {}

    def _sem(self, tenant):
        if tenant not in self._sems:
            self._sems[tenant] = asyncio.Semaphore(self._per_tenant)
        return self._sems[tenant]

    async def enter(self, tenant, patience=2.0):
        try:
            await asyncio.wait_for(self._sem(tenant).acquire(), patience)  # clean: handed to the caller, nothing is held on a timeout
        except asyncio.TimeoutError:
            raise Throttled(tenant) from None

    def leave(self, tenant):
        self._sem(tenant).release()

    @contextlib.asynccontextmanager
    async def hold(self, tenant):
        await self.enter(tenant)  # clean: left in finally
        try:
            yield
        finally:
            self.leave(tenant)


class WorkerPool:
    def __init__(self, workers, depth):
        self._ready = asyncio.Queue()
        for w in workers:
            for _ in range(depth):
                self._ready.put_nowait(w)
        self.dead = set()

    async def rent(self):
        while True:
            w = await self._ready.get()  # clean: near miss, seats of dead workers are discarded for good, others are handed out
            if w not in self.dead:
                return w

    async def rent_for(self, model):
        """First worker that has the model loaded."""
        aside = []
        try:
            while True:
                w = await self.rent()  # clean: near miss, those that do not fit go to aside, which finally returns
                if model in w.models:
                    return w
                aside.append(w)
                if self._ready.empty():
                    return None
        finally:
            for w in aside:
                self.unrent(w)

    def unrent(self, w):
        self._ready.put_nowait(w)


class SessionBuffers:
    def __init__(self, count):
        self._spare = deque(deque(maxlen=512) for _ in range(count))
        self.by_sid = {}

    def attach(self, sid):
        self.detach(sid)
        if not self._spare:
            return None
        buf = self._spare.popleft()  # clean: near miss, by_sid holds it until detach, by a second attach as well
        self.by_sid[sid] = buf
        return buf

    def detach(self, sid):
        buf = self.by_sid.pop(sid, None)
        if buf is not None:
            buf.clear()
            self._spare.append(buf)

class LeasedWorker:
    """async with; marks the worker dead on WorkerGone."""

    def __init__(self, pool):
        self.pool = pool
        self.w = None

    async def __aenter__(self):
        self.w = await self.pool.rent()  # leak: __aexit__ returns before unrent when the body is cancelled
        return self.w

    async def __aexit__(self, et, ev, tb):
        if et is asyncio.CancelledError:
            log.info("cancelled on %s", self.w)
            return False
        if et is WorkerGone:
            self.pool.dead.add(self.w)
        self.pool.unrent(self.w)
        return False


class Gateway:
    def __init__(self, permits: Permits, pool: WorkerPool, buffers: SessionBuffers):
        self.permits = permits
        self.pool = pool
        self.buffers = buffers
        self.tasks = set()
        self.usage = defaultdict(int)

    # ------------------------------------------------------------- unary
    async def complete(self, tenant, body):
        async with self.permits.hold(tenant):  # clean: the context manager leaves
            w = await self.pool.rent()  # clean: unrented in finally, also on the early return
            try:
                if body.get("dry_run"):
                    return {"worker": w.name}
                return await w.generate(body)
            finally:
                self.pool.unrent(w)

    async def embed(self, tenant, texts):
        await self.permits.enter(tenant)  # leak: not left when there are no texts
        if not texts:
            return []
        async with LeasedWorker(self.pool) as w:  # leak: a cancelled embed comes out of __aexit__ with the seat still rented
            try:
                return await w.embed(texts)
            finally:
                self.permits.leave(tenant)

    async def generate_with_retry(self, body, attempts=3):
        for _ in range(attempts):
            w = await self.pool.rent()  # leak: a timed-out attempt rents again without unrent
            try:
                out = await asyncio.wait_for(w.generate(body), 30)
            except asyncio.TimeoutError:
                log.warning("%s timed out", w.name)
                continue
            self.pool.unrent(w)
            return out
        raise WorkerGone("all attempts timed out")

    async def score_pair(self, model, a, b):
        first = await self.pool.rent_for(model)  # leak: not unrented when no second worker has the model
        if first is None:
            raise WorkerGone(model)
        second = await self.pool.rent_for(model)  # clean: unrented in finally
        if second is None:
            raise WorkerGone(model)
        try:
            return await asyncio.gather(first.score(a), second.score(b))
        finally:
            self.pool.unrent(first)
            self.pool.unrent(second)

    # ------------------------------------------------------------- background
    async def enqueue(self, tenant, body, on_done):
        await self.permits.enter(tenant)  # clean: near miss, the task's done callback leaves
        task = asyncio.create_task(self._run_one(body))
        self.tasks.add(task)

        def finished(t):
            self.tasks.discard(t)
            self.permits.leave(tenant)
            on_done(None if t.cancelled() else t.exception())

        task.add_done_callback(finished)
        return task

    async def _run_one(self, body):
        w = await self.pool.rent()  # clean: unrented in finally
        try:
            self.usage[w.name] += 1
            return await w.generate(body)
        finally:
            self.pool.unrent(w)

    async def enqueue_batch(self, tenant, bodies):
        started = []
        for body in bodies:
            await self.permits.enter(tenant)  # leak: body without a prompt is skipped with its permit taken
            if "prompt" not in body:
                continue
            task = asyncio.create_task(self._run_one(body))
            task.add_done_callback(lambda _t: self.permits.leave(tenant))
            started.append(task)
        return await asyncio.gather(*started, return_exceptions=True)

    # ------------------------------------------------------------- websocket
    async def session(self, ws, sid, tenant):
        buf = self.buffers.attach(sid)  # clean: detached in finally
        if buf is None:
            await ws.close(1013)
            return
        try:
            async for raw in ws:
                msg = json.loads(raw)
                if msg.get("type") == "bye":
                    break
                async for tok in self.stream(tenant, msg):
                    buf.append(tok)
                    await ws.send(tok)
        finally:
            self.buffers.detach(sid)

    async def stream(self, tenant, msg):
        await self.permits.enter(tenant)  # clean: near miss, the generator's finally leaves, worker or no worker
        w = None
        try:
            w = await self.pool.rent_for(msg["model"])  # clean: unrented in finally when there is one
            if w is None:
                yield "[no worker]"
                return
            async for tok in w.stream(msg):
                yield tok
        finally:
            if w is not None:
                self.pool.unrent(w)
            self.permits.leave(tenant)
