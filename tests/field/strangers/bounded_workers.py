"""Bounding the number of prefill jobs that run at once."""
import asyncio
import contextlib


class Budget:
    """Token budget shared by all prefill jobs."""

    def __init__(self, total):
        self.left = total

    def take(self, n):
        self.left -= n
        return n

    def restore(self, n):
        self.left += n


class Prefill:
    def __init__(self, limit, tokens):
        self.gate = asyncio.Semaphore(limit)
        self.budget = Budget(tokens)

    async def run(self, job):
        await self.gate.acquire()  # leak: an empty job returns before the release
        if not job.tokens:
            return None
        try:
            return await job.execute()
        finally:
            self.gate.release()

    async def run_guarded(self, job):
        grant = self.budget.take(len(job.tokens))  # clean: near miss, restored in finally, cancellation included
        try:
            async with self.gate:
                return await job.execute()
        finally:
            self.budget.restore(grant)

    async def run_quietly(self, job):
        grant = self.budget.take(len(job.tokens))  # leak: cancellation is swallowed and the grant forgotten
        try:
            result = await job.execute()
        except asyncio.CancelledError:
            return None
        except BaseException:
            self.budget.restore(grant)
            raise
        self.budget.restore(grant)
        return result

    async def run_many(self, jobs):
        async def one(job):
            await self.gate.acquire()  # clean: near miss, released by the finally of the inner coroutine
            try:
                return await job.execute()
            finally:
                self.gate.release()

        return await asyncio.gather(*(one(j) for j in jobs))

    @contextlib.asynccontextmanager
    async def granted(self, n):
        grant = self.budget.take(n)  # clean: near miss, context manager with finally
        try:
            yield grant
        finally:
            self.budget.restore(grant)

    async def poll(self, job, tries):
        for _ in range(tries):
            grant = self.budget.take(1)  # leak: a pending job sleeps and takes another grant
            state = job.state()
            if state == "pending":
                await asyncio.sleep(0.01)
                continue
            self.budget.restore(grant)
            return state
        return "timeout"
