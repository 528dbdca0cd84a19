"""Asyncio front end: concurrency semaphores, engine leases and request streams."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager


class EngineLease:
    def __init__(self, idx):
        self.idx = idx
        self.served = 0


class EnginePool:
    def __init__(self, n):
        self._ready = asyncio.Queue()
        for i in range(n):
            self._ready.put_nowait(EngineLease(i))

    async def checkout(self):
        return await self._ready.get()  # clean: returned to the caller

    def checkout_nowait(self):
        try:
            return self._ready.get_nowait()  # clean: returned to the caller
        except asyncio.QueueEmpty:
            return None

    def checkin(self, lease):
        lease.served += 1
        self._ready.put_nowait(lease)

    @asynccontextmanager
    async def lease(self):
        engine = await self.checkout()  # clean: the finally checks it in
        try:
            yield engine
        finally:
            self.checkin(engine)


class CompletionServer:
    def __init__(self, pool, limit):
        self.pool = pool
        self.sem = asyncio.Semaphore(limit)
        self.prefill_lock = asyncio.Lock()
        self.streams = {}
        self.rejected = 0

    async def complete(self, prompt):
        await self.sem.acquire()  # leak: the empty-prompt rejection never releases the semaphore
        if not prompt:
            self.rejected += 1
            return {"error": "empty prompt"}
        async with self.pool.lease() as engine:  # clean: async context manager
            text = f"{engine.idx}:{prompt}"
        self.sem.release()
        return {"text": text}

    async def complete_safe(self, prompt):
        await self.sem.acquire()  # clean: near miss, the rejection returns through the finally
        try:
            if not prompt:
                self.rejected += 1
                return {"error": "empty prompt"}
            async with self.pool.lease() as engine:  # clean: async context manager
                return {"text": f"{engine.idx}:{prompt}"}
        finally:
            self.sem.release()

    async def complete_with_timeout(self, prompt, timeout):
        engine = await self.pool.checkout()  # leak: the timeout handler answers 408 and forgets the engine
        try:
            text = await asyncio.wait_for(self._run(engine, prompt), timeout)
        except asyncio.TimeoutError:
            return {"error": 408}
        self.pool.checkin(engine)
        return {"text": text}

    async def _run(self, engine, prompt):
        await asyncio.sleep(0)
        return f"{engine.idx}:{prompt}"

    async def complete_or_busy(self, prompt):
        engine = self.pool.checkout_nowait()  # clean: near miss, None means busy, and the else arm checks it in
        if engine is None:
            return {"error": 503}
        else:
            text = await self._run(engine, prompt)
            self.pool.checkin(engine)
        return {"text": text}

    async def prefill(self, prompt, cached):
        await self.prefill_lock.acquire()  # leak: a cached prompt returns with the lock held
        if prompt in cached:
            return cached[prompt]
        cached[prompt] = len(prompt)
        self.prefill_lock.release()
        return cached[prompt]

    async def prefill_many(self, prompts):
        total = 0
        for p in prompts:
            await self.prefill_lock.acquire()  # clean: near miss, released before the continue as well
            if not p:
                self.prefill_lock.release()
                continue
            total += len(p)
            self.prefill_lock.release()
        return total

    async def open_stream(self, sid):
        engine = await self.pool.checkout()  # leak: disconnect() pops the stream but does not check the engine in
        old = self.streams.pop(sid, None)
        if old is not None:
            self.pool.checkin(old)
        self.streams[sid] = engine

    def disconnect(self, sid):
        engine = self.streams.pop(sid, None)
        if engine is None:
            return False
        engine.served += 1
        return True

    async def stream(self, prompt):
        engine = await self.pool.checkout()  # leak: when the client stops iterating, the generator never reaches the checkin
        for ch in prompt:
            yield f"{engine.idx}{ch}"
        self.pool.checkin(engine)

    async def stream_guarded(self, prompt):
        engine = await self.pool.checkout()  # clean: near miss, the finally runs when the generator is closed
        try:
            for ch in prompt:
                if ch == "\0":
                    return
                yield f"{engine.idx}{ch}"
        finally:
            self.pool.checkin(engine)


class WorkerLoop:
    def __init__(self, pool, jobs, sem):
        self.pool = pool
        self.jobs = jobs
        self.sem = sem
        self.tasks = set()

    async def run(self):
        while True:
            await self.sem.acquire()  # leak: the shutdown sentinel breaks out between acquire and release
            job = await self.jobs.get()
            if job is None:
                break
            await self._work(job)
            self.sem.release()

    async def run_spawning(self):
        while True:
            job = await self.jobs.get()
            if job is None:
                break
            await self.sem.acquire()  # clean: near miss, the task's done callback releases it
            task = asyncio.ensure_future(self._work(job))
            self.tasks.add(task)
            task.add_done_callback(self._done)
        await asyncio.gather(*self.tasks)

    def _done(self, task):
        self.tasks.discard(task)
        self.sem.release()

    async def _work(self, job):
        async with self.pool.lease() as engine:  # clean: async context manager
            return (engine.idx, job)


async def drain(pool, n):
    engines = [await pool.checkout() for _ in range(n)]  # clean: near miss, every engine of the list is checked in
    served = sum(e.served for e in engines)
    for e in engines:
        pool.checkin(e)
    return served
