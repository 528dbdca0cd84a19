"""Token credits that bound what the serving front end lets in."""
import asyncio
import time
from dataclasses import dataclass


class CreditGate:
    """Credits are plain numbers: reserve takes n, refund gives n back."""

    def __init__(self, total):
        self._total = total
        self._left = total
        self._waiters = []

    def reserve(self, n):
        if n > self._left:
            return 0
        self._left -= n  # clean: the amount is returned to the caller
        return n

    def reserve_upto(self, n):
        got = min(n, self._left)
        self._left -= got  # clean: the amount is returned to the caller
        return got

    async def reserve_wait(self, n):
        while True:
            got = self.reserve(n)  # clean: near miss, loops only when nothing was taken
            if got:
                return got
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    def refund(self, n):
        self._left = min(self._total, self._left + n)
        waiters, self._waiters = self._waiters, []
        for fut in waiters:
            if not fut.done():
                fut.set_result(None)


@dataclass
class Job:
    prompt_len: int
    max_new: int
    credits: int = 0
    started: float = 0.0


class Frontend:
    def __init__(self, gate, engine):
        self._gate = gate
        self._engine = engine
        self._running = {}

    def admit(self, rid, job):
        credits = self._gate.reserve(job.prompt_len + job.max_new)  # clean: near miss, kept in the job and refunded by done
        if not credits:
            return False
        job.credits = credits
        job.started = time.monotonic()
        self._running[rid] = job
        return True

    def done(self, rid):
        job = self._running.pop(rid, None)
        if job is not None:
            self._gate.refund(job.credits)
            job.credits = 0

    def resize(self, rid, prompt_len, max_new):
        job = self._running[rid]
        credits = self._gate.reserve(prompt_len + max_new)  # leak: assigned over the credits the job already holds
        if not credits:
            return False
        job.prompt_len, job.max_new = prompt_len, max_new
        job.credits = credits
        return True

    async def generate(self, job):
        credits = await self._gate.reserve_wait(job.prompt_len + job.max_new)  # clean: refunded in finally
        try:
            return await self._engine.run(job)
        finally:
            self._gate.refund(credits)

    async def generate_retry(self, job, attempts):
        for attempt in range(attempts):
            credits = await self._gate.reserve_wait(job.prompt_len + job.max_new)  # leak: the busy handler retries without a refund
            try:
                out = await self._engine.run(job)
            except BlockingIOError:
                await asyncio.sleep(0.05 * 2 ** attempt)
                continue
            self._gate.refund(credits)
            return out
        return None

    async def generate_soft(self, job, attempts):
        credits = await self._gate.reserve_wait(job.prompt_len + job.max_new)  # clean: near miss, one reservation over all attempts
        out = None
        for attempt in range(attempts):
            try:
                out = await self._engine.run(job)
                break
            except BlockingIOError:
                await asyncio.sleep(0.05 * 2 ** attempt)
        self._gate.refund(credits)
        return out

    async def stream(self, job):
        credits = await self._gate.reserve_wait(job.max_new)  # clean: near miss, finally also runs when the consumer stops early
        try:
            async for token in self._engine.tokens(job):
                if token is None:
                    return
                yield token
        finally:
            self._gate.refund(credits)

    async def stream_chunks(self, job, size):
        credits = await self._gate.reserve_wait(job.max_new)  # leak: an end-of-text token returns before the refund
        chunk = []
        async for token in self._engine.tokens(job):
            if token is None:
                yield chunk
                return
            chunk.append(token)
            if len(chunk) == size:
                yield chunk
                chunk = []
        self._gate.refund(credits)


def fill_batch(gate, jobs, width):
    batch = []
    budget = gate.reserve_upto(width)  # leak: what the chosen jobs do not use up is not refunded
    for job in jobs:
        if job.max_new > budget:
            break
        budget -= job.max_new
        job.credits = job.max_new
        batch.append(job)
    return batch


def reserve_both(gate, prefill, decode):
    first = gate.reserve(prefill)  # leak: lost when only the second reservation fails
    second = gate.reserve(decode)  # leak: lost when only the first reservation fails
    return first + second if first and second else 0


def probe_capacity(gate, step):
    taken = 0
    while True:
        got = gate.reserve(step)  # clean: near miss, summed up and refunded in one go
        if not got:
            break
        taken += got
    gate.refund(taken)
    return taken
