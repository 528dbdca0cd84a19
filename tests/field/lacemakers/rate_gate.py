"""Async rate permits for an LLM gateway: requests per tenant and tokens per model."""
import asyncio
import contextlib
import dataclasses
import time


class Throttled(Exception):
    def __init__(self, retry_after: float) -> None:
        super().__init__(f"retry after {retry_after:.1f}s")
        self.retry_after = retry_after


class PermitGate:
    """Concurrency permits of one tenant."""

    def __init__(self, width: int) -> None:
        self._sem = asyncio.Semaphore(width)
        self.taken = 0

    async def enter(self) -> None:
        await self._sem.acquire()  # clean: the caller owes leave()
        self.taken += 1

    def try_enter(self) -> bool:
        if self._sem.locked():
            return False
        self._sem._value -= 1
        self.taken += 1
        return True

    def leave(self) -> None:
        self.taken -= 1
        self._sem.release()

    async def enter_capped(self, ceiling: int) -> bool:
        await self._sem.acquire()  # leak: refused above the ceiling without releasing
        if self.taken >= ceiling:
            return False
        self.taken += 1
        return True


@dataclasses.dataclass
class TokenGrant:
    bucket: "TokenBucket"
    tokens: int
    settled: bool = False

    def settle(self, used: int) -> None:
        if self.settled:
            return
        self.settled = True
        self.bucket.refund(max(self.tokens - used, 0))
        self.bucket.outstanding -= self.tokens


class TokenBucket:
    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.outstanding = 0
        self._stamp = time.monotonic()

    def _refill(self) -> None:
        now = time.monotonic()
        self.level = min(self.per_minute, self.level + (now - self._stamp) * self.per_minute / 60)
        self._stamp = now

    def reserve(self, tokens: int) -> TokenGrant | None:
        self._refill()
        if self.level < tokens:
            return None
        self.level -= tokens
        self.outstanding += tokens
        return TokenGrant(self, tokens)

    def refund(self, tokens: int) -> None:
        self.level = min(self.per_minute, self.level + tokens)

    def reserve_or_raise(self, tokens: int) -> TokenGrant:
        grant = self.reserve(tokens)  # clean: returned to the caller
        if grant is None:
            raise Throttled((tokens - self.level) * 60 / self.per_minute)
        return grant


class Gateway:
    def __init__(self, tenants: dict[str, PermitGate], buckets: dict[str, TokenBucket], backend) -> None:
        self.tenants = tenants
        self.buckets = buckets
        self.backend = backend
        self._grants: dict[str, TokenGrant] = {}
        self._tasks: set[asyncio.Task] = set()

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: str):
        gate = self.tenants[tenant]
        await gate.enter()  # clean: left in finally
        try:
            yield gate
        finally:
            gate.leave()

    async def complete(self, tenant: str, model: str, prompt: str, budget: int) -> str:
        async with self.admitted(tenant):  # clean: context manager
            grant = self.buckets[model].reserve_or_raise(budget)  # clean: settled in finally
            used = budget
            try:
                text, used = await self.backend.generate(model, prompt, budget)
                return text
            finally:
                grant.settle(used)

    async def complete_fast(self, tenant: str, model: str, prompt: str, budget: int) -> str:
        gate = self.tenants[tenant]
        await gate.enter()  # leak: the permit stays taken when the bucket throttles
        grant = self.buckets[model].reserve(budget)  # clean: settled in finally
        if grant is None:
            raise Throttled(1.0)
        used = budget
        try:
            text, used = await self.backend.generate(model, prompt, budget)
        finally:
            grant.settle(used)
            gate.leave()
        return text

    async def moderate_many(self, tenant: str, texts: list[str]) -> list[bool]:
        gate = self.tenants[tenant]
        verdicts = []
        for text in texts:
            if not gate.try_enter():  # leak: cached verdicts continue without leaving
                await asyncio.sleep(0.01)
                verdicts.append(True)
                continue
            hit = self.backend.cached_verdict(text)
            if hit is not None:
                verdicts.append(hit)
                continue
            verdicts.append(await self.backend.moderate(text, priority=True))
            gate.leave()
        return verdicts

    async def with_retries(self, tenant: str, model: str, prompt: str, budget: int) -> str:
        bucket = self.buckets[model]
        for attempt in range(3):
            grant = bucket.reserve_or_raise(budget)  # leak: a connection error is swallowed and the grant dropped
            try:
                text, used = await self.backend.generate(model, prompt, budget)
            except ConnectionError:
                await asyncio.sleep(2 ** attempt * 0.1)
                continue
            grant.settle(used)
            return text
        raise ConnectionError(model)

    async def with_retries_settled(self, model: str, prompt: str, budget: int) -> str:
        bucket = self.buckets[model]
        for attempt in range(3):
            grant = bucket.reserve_or_raise(budget)  # clean: near miss, the handler settles before the next turn
            try:
                text, used = await self.backend.generate(model, prompt, budget)
            except ConnectionError:
                grant.settle(0)
                await asyncio.sleep(2 ** attempt * 0.1)
                continue
            except BaseException:
                grant.settle(budget)
                raise
            grant.settle(used)
            return text
        raise ConnectionError(model)

    def begin_stream(self, rid: str, model: str, budget: int) -> bool:
        if rid in self._grants:
            return False
        grant = self.buckets[model].reserve(budget)  # clean: near miss, kept in _grants until end_stream
        if grant is None:
            return False
        self._grants[rid] = grant
        return True

    def grow_stream(self, rid: str, extra: int) -> bool:
        old = self._grants.get(rid)
        if old is None:
            return False
        more = old.bucket.reserve(extra)  # leak: dropped unmerged when the backend has closed the stream
        if more is None:
            return False
        if self.backend.closing(rid):
            return False
        old.tokens += more.tokens
        return True

    def end_stream(self, rid: str, used: int) -> None:
        grant = self._grants.pop(rid, None)
        if grant is not None:
            grant.settle(used)

    async def _later(self, gate: PermitGate, coro) -> None:
        try:
            await coro
        finally:
            gate.leave()

    async def fire(self, tenant: str, coro) -> None:
        gate = self.tenants[tenant]
        await gate.enter()  # clean: near miss, the spawned task leaves in its finally
        task = asyncio.create_task(self._later(gate, coro))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def fire_plain(self, tenant: str, coro) -> None:
        gate = self.tenants[tenant]
        await gate.enter()  # leak: the spawned task never leaves the gate
        task = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
