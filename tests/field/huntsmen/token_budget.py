"""Client side rate limiting for a hosted language model: token grants and a concurrency gate.

A request first takes a grant for the tokens that it may use, calls the API, and settles
the grant with what was really used.  Grants not settled count as spent for ever.
"""
import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import AsyncIterator

log = logging.getLogger("budget")


class RequestTooLarge(ValueError):
    pass


class DeadlineExceeded(Exception):
    pass


class RateLimited(Exception):
    def __init__(self, retry_after):
        super().__init__(retry_after)
        self.retry_after = retry_after


class ContentFiltered(Exception):
    pass


class Gate:
    """Counts calls in flight; the non-blocking way in returns a bool."""

    def __init__(self, width):
        self.width = width
        self.inside = 0
        self._room = asyncio.Event()
        self._room.set()

    def try_enter(self):
        if self.inside >= self.width:
            return False
        self.inside += 1
        if self.inside == self.width:
            self._room.clear()
        return True

    async def enter(self):
        while not self.try_enter():  # clean: entered for the caller
            await self._room.wait()

    def leave(self):
        self.inside -= 1
        self._room.set()


@dataclass
class Grant:
    gid: int
    tokens: int
    opened: float = field(default_factory=time.monotonic)
    settled: bool = False


class Budget:
    def __init__(self, tokens_per_minute, width=16):
        self.cap = tokens_per_minute
        self.available = float(tokens_per_minute)
        self.gate = Gate(width)
        self._ids = itertools.count()
        self._stamp = time.monotonic()
        self.open_tokens = 0

    def _refill(self):
        now = time.monotonic()
        room = self.cap - self.open_tokens
        self.available = min(room, self.available + (now - self._stamp) * self.cap / 60.0)
        self._stamp = now

    def _grant(self, tokens):
        self.available -= tokens
        self.open_tokens += tokens
        return Grant(next(self._ids), tokens)

    async def reserve(self, tokens, deadline=None):
        if tokens > self.cap:
            raise RequestTooLarge(f"{tokens} > {self.cap}")
        await self.gate.enter()  # leak: DeadlineExceeded is raised while inside the gate, and there is no grant to settle
        self._refill()
        while self.available < tokens:
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceeded(f"{tokens} tokens not free in time")
            await asyncio.sleep(0.05)
            self._refill()
        return self._grant(tokens)  # clean: handed to the caller

    def try_reserve(self, tokens):
        if not self.gate.try_enter():  # clean: near miss, left again when the tokens do not suffice, else settle() leaves
            return None
        self._refill()
        if self.available < tokens:
            self.gate.leave()
            return None
        return self._grant(tokens)  # clean: handed to the caller

    def settle(self, grant, used):
        if grant.settled:
            return
        grant.settled = True
        self.open_tokens -= grant.tokens
        self.available += max(0, grant.tokens - used)
        self.gate.leave()

    def refund(self, grant):
        self.settle(grant, 0)


@dataclass
class BatchJob:
    """A server-side batch; its grant stays open until the server reports an end."""
    job_id: str
    grant: Grant
    prompts: int
    state: str = "submitted"


class LlmClient:
    def __init__(self, api, budget, shadow_rate=0.01):
        self.api = api
        self.budget = budget
        self.shadow_rate = shadow_rate
        self.batches: dict[str, BatchJob] = {}
        self.counts = {"ok": 0, "filtered": 0, "limited": 0, "late": 0}

    @staticmethod
    def estimate(prompt, max_tokens):
        return len(prompt) // 3 + max_tokens

    def _parse(self, reply):
        choice = reply["choices"][0]
        if choice["finish_reason"] == "content_filter":
            raise ContentFiltered(reply["id"])
        return choice["text"], reply["usage"]["total_tokens"]

    async def complete(self, prompt, max_tokens=256):
        grant = await self.budget.reserve(self.estimate(prompt, max_tokens))  # leak: _parse raises ContentFiltered before the settle
        try:
            reply = await self.api.post("/completions", prompt=prompt, max_tokens=max_tokens)
        except RateLimited:
            self.counts["limited"] += 1
            self.budget.refund(grant)
            raise
        text, used = self._parse(reply)
        self.budget.settle(grant, used)
        self.counts["ok"] += 1
        return text

    async def stream(self, prompt, max_tokens=256) -> AsyncIterator[str]:
        grant = await self.budget.reserve(self.estimate(prompt, max_tokens))  # clean: near miss, settled in the finally of the generator
        seen = len(prompt) // 3
        try:
            async for piece in self.api.stream("/completions", prompt=prompt, max_tokens=max_tokens):
                seen += 1
                yield piece
        finally:
            self.budget.settle(grant, seen)

    async def complete_growing(self, prompt, max_tokens=64, ceiling=1024):
        """Ask again with more room while the answer is cut off."""
        grant = await self.budget.reserve(self.estimate(prompt, max_tokens))  # leak: a truncated answer rebinds the name to the next grant
        while True:
            reply = await self.api.post("/completions", prompt=prompt, max_tokens=max_tokens)
            choice = reply["choices"][0]
            if choice["finish_reason"] != "length" or max_tokens >= ceiling:
                break
            max_tokens *= 2
            log.debug("answer cut off, again with %d", max_tokens)
            grant = await self.budget.reserve(self.estimate(prompt, max_tokens))  # leak: the third round rebinds this one as well
        self.budget.settle(grant, reply["usage"]["total_tokens"])
        return choice["text"]

    async def _run_with(self, grant, prompt, max_tokens):
        used = 0
        try:
            reply = await self.api.post("/completions", prompt=prompt, max_tokens=max_tokens)
            used = reply["usage"]["total_tokens"]
            return reply["choices"][0]["text"]
        except RateLimited as exc:
            log.info("limited for %.1fs", exc.retry_after)
            return None
        finally:
            self.budget.settle(grant, used)

    async def map(self, prompts, max_tokens=128):
        tasks = []
        for prompt in prompts:
            grant = await self.budget.reserve(self.estimate(prompt, max_tokens))  # clean: near miss, the task settles it in its finally
            tasks.append(asyncio.create_task(self._run_with(grant, prompt, max_tokens)))
        return await asyncio.gather(*tasks)

    async def map_before(self, prompts, deadline, max_tokens=128):
        """All or nothing: start only when there are grants for every prompt."""
        grants = {}
        try:
            for i, prompt in enumerate(prompts):
                grants[i] = await self.budget.reserve(self.estimate(prompt, max_tokens), deadline)  # leak: DeadlineExceeded for a later prompt drops the grants before it
        except DeadlineExceeded:
            self.counts["late"] += 1
            return None
        return await asyncio.gather(*(self._run_with(grants[i], p, max_tokens) for i, p in enumerate(prompts)))

    def _shadow_done(self, grant, future):
        if future.cancelled() or future.exception() is not None:
            self.budget.refund(grant)
            return
        self.budget.settle(grant, future.result()["usage"]["total_tokens"])

    def shadow(self, prompt, draw):
        """Send a copy of some traffic to the next model, if there is budget to spare."""
        grant = self.budget.try_reserve(self.estimate(prompt, 64))  # clean: near miss, refunded when not sampled, else the callback settles on each outcome
        if grant is None:
            return None
        if draw() > self.shadow_rate:
            self.budget.refund(grant)
            return None
        task = asyncio.ensure_future(self.api.post("/shadow", prompt=prompt, max_tokens=64))
        task.add_done_callback(partial(self._shadow_done, grant))
        return task

    async def submit_batch(self, prompts, max_tokens=128):
        need = sum(self.estimate(p, max_tokens) for p in prompts)
        grant = await self.budget.reserve(need)  # leak: poll_batches() removes an expired batch without settling its grant
        reply = await self.api.post("/batches", prompts=prompts, max_tokens=max_tokens)
        job = BatchJob(reply["id"], grant, len(prompts))
        self.batches[job.job_id] = job
        return job.job_id

    async def poll_batches(self):
        for job_id, job in list(self.batches.items()):
            status = await self.api.get(f"/batches/{job_id}")
            job.state = status["state"]
            if job.state == "running":
                continue
            del self.batches[job_id]
            if job.state == "expired":
                log.warning("batch %s of %d prompts expired", job_id, job.prompts)
                continue
            self.budget.settle(job.grant, status["usage"]["total_tokens"])

    async def classify(self, prompt, labels):
        grant = await self.budget.reserve(self.estimate(prompt, 1))  # clean: settled on each way out
        used = 0
        try:
            reply = await self.api.post("/score", prompt=prompt, labels=labels)
            used = reply["usage"]["total_tokens"]
            scores = reply["scores"]
            if len(scores) != len(labels):
                raise ValueError("the server scored other labels")
            return max(zip(scores, labels))[1]
        finally:
            self.budget.settle(grant, used)
