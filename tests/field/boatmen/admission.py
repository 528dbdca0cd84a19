"""Admission control for an LLM front end.

Three budgets: requests in flight, tokens in flight per model, and a rate bucket per
API key. A request is let in when it has all three; what it holds is a Ticket.
"""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import time
import typing

import structlog

log = structlog.get_logger()


class Reject(Exception):
    def __init__(self, reason: str, retry_after: float = 1.0):
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


class Priority(enum.IntEnum):
    BATCH = 0
    NORMAL = 1
    HIGH = 2


class TokenBudget:
    """Tokens that may be in flight for one model."""

    def __init__(self, total: int):
        self.total = total
        self.left = total
        self._cond = asyncio.Condition()

    async def reserve(self, n: int, timeout: float) -> int:
        if n > self.total:
            raise Reject("request is larger than the budget", 0)
        deadline = time.monotonic() + timeout
        async with self._cond:
            while self.left < n:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise Reject("token budget")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._cond.wait(), rest)
            self.left -= n
        return n

    async def unreserve(self, n: int) -> None:
        async with self._cond:
            self.left += n
            self._cond.notify_all()


class Gate:
    """Requests in flight, with a reserve for those of high priority."""

    def __init__(self, limit: int, reserve: int):
        self._all = asyncio.Semaphore(limit)
        self._high = asyncio.Semaphore(reserve)

    async def enter(self, prio: Priority) -> asyncio.Semaphore:
        if prio is Priority.HIGH and not self._high.locked():
            await self._high.acquire()  # clean: the semaphore itself is returned and leave() releases it
            return self._high
        if prio is Priority.BATCH and self._all.locked():
            raise Reject("batch requests wait", 10.0)
        await self._all.acquire()  # clean: returned as well, so that leave() knows which of the two it was
        return self._all

    def leave(self, which: asyncio.Semaphore) -> None:
        which.release()


class Bucket:
    def __init__(self, rate: float, burst: int):
        self.rate = rate
        self.level = float(burst)
        self.burst = burst
        self.stamp = time.monotonic()

    def draw(self, n: float) -> bool:
        now = time.monotonic()
        self.level = min(self.burst, self.level + (now - self.stamp) * self.rate)
        self.stamp = now
        if self.level < n:
            return False
        self.level -= n
        return True

    def put_back(self, n: float) -> None:
        self.level = min(self.burst, self.level + n)


@dataclasses.dataclass
class Ticket:
    key: str
    model: str
    tokens: int
    gate: asyncio.Semaphore | None = None
    started: float = dataclasses.field(default_factory=time.monotonic)
    closed: bool = False


class Admission:
    def __init__(self, models: dict[str, int], limit: int = 256):
        self.gate = Gate(limit, limit // 8)
        self.budgets = {m: TokenBudget(n) for m, n in models.items()}
        self.buckets: dict[str, Bucket] = {}
        self.parked: dict[str, Ticket] = {}

    def _bucket(self, key: str) -> Bucket:
        return self.buckets.setdefault(key, Bucket(5.0, 20))

    async def admit(self, key: str, model: str, tokens: int, prio: Priority = Priority.NORMAL) -> Ticket:
        budget = self.budgets.get(model)
        if budget is None:
            raise Reject("no such model", 0)
        which = await self.gate.enter(prio)  # leak: the Reject of an empty rate bucket leaves without leave()
        if not self._bucket(key).draw(1):  # clean: near miss, what is drawn is spent for good unless the budget rejects, and then it is put back
            raise Reject("rate limit", 0.2)
        try:
            await budget.reserve(tokens, timeout=5.0)  # clean: near miss, in the ticket, see close()
        except Reject:
            self._bucket(key).put_back(1)
            self.gate.leave(which)
            raise
        return Ticket(key, model, tokens, which)

    async def close(self, ticket: Ticket) -> None:
        if ticket.closed:
            return
        ticket.closed = True
        await self.budgets[ticket.model].unreserve(ticket.tokens)
        if ticket.gate is not None:
            self.gate.leave(ticket.gate)
        log.debug("closed", key=ticket.key, seconds=time.monotonic() - ticket.started)

    @contextlib.asynccontextmanager
    async def admitted(self, key: str, model: str, tokens: int, prio: Priority = Priority.NORMAL):
        ticket = await self.admit(key, model, tokens, prio)  # clean: closed in the finally
        try:
            yield ticket
        finally:
            await self.close(ticket)

    async def top_up(self, ticket: Ticket, more: int) -> bool:
        """The answer grows longer than was thought."""
        budget = self.budgets[ticket.model]
        try:
            await budget.reserve(more, timeout=0.5)  # leak: ticket.tokens is raised by the rounded number, so that close() gives back less
        except Reject:
            return False
        ticket.tokens += more // 16 * 16
        return True

    # A tool call may take minutes. Meanwhile the tokens stay, the gate does not.

    def park(self, call_id: str, ticket: Ticket) -> None:
        if ticket.gate is not None:
            self.gate.leave(ticket.gate)
            ticket.gate = None
        self.parked[call_id] = ticket

    async def unpark(self, call_id: str) -> Ticket:
        ticket = self.parked.pop(call_id)
        ticket.gate = await self.gate.enter(Priority.HIGH)  # clean: near miss, park() left the old one, close() leaves this one
        return ticket

    async def expire_parked(self, older: float) -> None:
        now = time.monotonic()
        for call_id, ticket in list(self.parked.items()):
            if now - ticket.started > older:
                await self.close(self.parked.pop(call_id))


class Frontend:
    def __init__(self, admission: Admission, engine):
        self.admission = admission
        self.engine = engine
        self.tasks: set[asyncio.Task] = set()

    async def chat(self, key: str, model: str, prompt: list[int], max_new: int) -> dict:
        async with self.admission.admitted(key, model, len(prompt) + max_new) as ticket:  # clean: closed by the context manager
            out = []
            async for tok in self.engine.stream(model, prompt):
                out.append(tok)
                if len(out) >= ticket.tokens and not await self.admission.top_up(ticket, 100):
                    break
            return {"tokens": out}

    async def submit_batch(self, key: str, model: str, prompts: list[list[int]]) -> list[str]:
        ids = []
        for prompt in prompts:
            try:
                ticket = await self.admission.admit(key, model, len(prompt), Priority.BATCH)  # clean: near miss, it goes with the task, whose finally closes it
            except Reject as exc:
                await asyncio.sleep(exc.retry_after)
                continue
            task = asyncio.create_task(self._run_batch(ticket, model, prompt))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            ids.append(task.get_name())
        return ids

    async def _run_batch(self, ticket: Ticket, model: str, prompt: list[int]) -> None:
        try:
            await self.engine.run(model, prompt)
        finally:
            await self.admission.close(ticket)

    @staticmethod
    def _tool(tools, name: str) -> typing.Callable:
        if name not in tools:
            raise Reject(f"tool {name}", 0)
        return tools[name]

    async def agent_step(self, key: str, model: str, prompt: list[int], tools) -> typing.Any:
        ticket = await self.admission.admit(key, model, len(prompt))  # leak: for an unknown tool _tool raises Reject out of the loop and close() is not reached
        while True:
            answer = await self.engine.run(model, prompt)
            if answer.tool is None:
                break
            tool = self._tool(tools, answer.tool)
            self.admission.park(answer.call_id, ticket)
            prompt = prompt + await tool(answer.args)
            ticket = await self.admission.unpark(answer.call_id)  # leak: the same raise in a later round leaves this ticket open
        await self.admission.close(ticket)
        return answer

    async def with_fallback(self, key: str, models: list[str], prompt: list[int]) -> typing.Any:
        for model in models:
            try:
                ticket = await self.admission.admit(key, model, len(prompt), Priority.HIGH)  # leak: EngineDead goes on to the next model with the ticket open
            except Reject:
                continue
            try:
                answer = await self.engine.run(model, prompt)
            except self.engine.EngineDead:
                log.warning("engine dead", model=model)
                continue
            await self.admission.close(ticket)
            return answer
        raise Reject("no model left")
