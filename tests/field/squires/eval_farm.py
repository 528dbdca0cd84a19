"""Asynchronous evaluation farm: cases are scored by model endpoints, each behind a gate of limited width."""
import asyncio
import logging
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger("evalfarm")


class RateLimited(Exception):
    def __init__(self, after: float):
        super().__init__(f"retry in {after}s")
        self.after = after


class JudgeBusy(Exception):
    pass


@dataclass
class Case:
    id: str
    prompt: str
    reference: str
    cached: Optional[str] = None


@dataclass
class Verdict:
    case_id: str
    score: float
    note: str = ""
    seconds: float = 0.0


@dataclass
class Ticket:
    endpoint: str
    number: int
    entered: float = 0.0


@dataclass
class GateStats:
    entered: int = 0
    left: int = 0
    busy_seconds: float = field(default=0.0)


class Gate:
    def __init__(self, endpoint: str, width: int):
        self.endpoint = endpoint
        self.width = width
        self.stats = GateStats()
        self._tickets: asyncio.Queue[Ticket] = asyncio.Queue()
        for number in range(width):
            self._tickets.put_nowait(Ticket(endpoint, number))

    async def enter(self) -> Ticket:
        ticket = await self._tickets.get()  # clean: returned to the caller
        ticket.entered = time.monotonic()
        self.stats.entered += 1
        return ticket

    def enter_nowait(self) -> Optional[Ticket]:
        try:
            return self._tickets.get_nowait()  # clean: returned to the caller
        except asyncio.QueueEmpty:
            return None

    def leave(self, ticket: Ticket) -> None:
        self.stats.left += 1
        self.stats.busy_seconds += time.monotonic() - ticket.entered
        self._tickets.put_nowait(ticket)

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[Ticket]:
        ticket = await self.enter()  # clean: left in the finally
        try:
            yield ticket
        finally:
            self.leave(ticket)


class JudgeSession:
    """A conversation with the judge that keeps its ticket, so that the judge keeps its prefix in cache."""

    def __init__(self, gate: Gate, client: Any):
        self._gate = gate
        self._client = client
        self._ticket: Optional[Ticket] = None
        self._turns = 0

    async def open(self, rubric: str) -> None:
        self._ticket = await self._gate.enter()  # leak: close() returns early for a session without turns
        self._rubric = rubric

    async def grade(self, answer: str, reference: str) -> float:
        self._turns += 1
        text = await self._client.complete(f"{self._rubric}\n\n{reference}\n---\n{answer}")
        return float(text.strip().split()[0])

    async def close(self) -> None:
        if self._turns == 0:
            return
        logger.debug("judge session closed after %d turns", self._turns)
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._gate.leave(ticket)


class Farm:
    def __init__(self, model: Gate, judge: Gate, client: Any, retries: int = 3):
        self.model = model
        self.judge = judge
        self.client = client
        self.retries = retries
        self._work: asyncio.Queue = asyncio.Queue(maxsize=64)
        self._seen: set[str] = set()
        self._tasks: set[asyncio.Task] = set()
        self.verdicts: list[Verdict] = []

    async def score_exact(self, case: Case, timeout: float = 30.0) -> Verdict:
        ticket = await self.model.enter()  # leak: the verdict for a timeout is returned without leave
        begun = time.monotonic()
        try:
            answer = await asyncio.wait_for(self.client.complete(case.prompt), timeout)
        except asyncio.TimeoutError:
            logger.warning("case %s timed out", case.id)
            return Verdict(case.id, 0.0, "timeout", timeout)
        self.model.leave(ticket)
        return Verdict(case.id, float(answer.strip() == case.reference), seconds=time.monotonic() - begun)

    async def score_judged(self, case: Case) -> Verdict:
        ticket = await self.model.enter()  # leak: JudgeBusy is raised while it is held
        judge_ticket = self.judge.enter_nowait()  # clean: left in the finally
        if judge_ticket is None:
            raise JudgeBusy(f"no judge for {case.id}")
        try:
            answer = await self.client.complete(case.prompt)
            grade = await self.client.complete(f"Grade 0..10: {answer}")
            return Verdict(case.id, float(grade) / 10)
        finally:
            self.judge.leave(judge_ticket)
            self.model.leave(ticket)

    async def complete_with_retry(self, prompt: str) -> str:
        for attempt in range(1, self.retries + 1):
            ticket = await self.model.enter()  # leak: after RateLimited the next attempt takes another one
            try:
                reply = await self.client.complete(prompt)
            except RateLimited as exc:
                logger.info("attempt %d: %s", attempt, exc)
                await asyncio.sleep(exc.after + random.random())
                continue
            self.model.leave(ticket)
            return reply
        raise RuntimeError(f"gave up after {self.retries} attempts")

    async def score_lenient(self, case: Case) -> Verdict:
        ticket = None if case.cached else await self.model.enter()  # clean: near miss, the finally asks whether there is one
        try:
            answer = case.cached or await self.client.complete(case.prompt)
        finally:
            if ticket is not None:
                self.model.leave(ticket)
        hit = case.reference.lower() in answer.lower()
        return Verdict(case.id, 1.0 if hit else 0.0)

    async def run_batch(self, cases: list[Case]) -> None:
        for case in cases:
            ticket = await self.model.enter()  # clean: near miss, the done callback of the task leaves, also when the task is cancelled
            task = asyncio.create_task(self._run_one(case), name=f"case-{case.id}")
            task.add_done_callback(lambda _task, ticket=ticket: self.model.leave(ticket))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_one(self, case: Case) -> None:
        answer = await self.client.complete(case.prompt)
        self.verdicts.append(Verdict(case.id, float(answer == case.reference)))

    def cancel_batch(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    # Cases enter the queue together with a ticket, so the queue never outruns the endpoint.

    async def feed(self, cases: list[Case], workers: int) -> None:
        for case in cases:
            ticket = await self.model.enter()  # leak: the worker skips a case seen before and forgets the ticket that came with it
            await self._work.put((case, ticket))
        for _ in range(workers):
            await self._work.put(None)

    async def worker(self) -> int:
        scored = 0
        while True:
            item = await self._work.get()
            if item is None:
                return scored
            case, ticket = item
            if case.id in self._seen:
                logger.debug("case %s was scored already", case.id)
                continue
            self._seen.add(case.id)
            try:
                await self._run_one(case)
                scored += 1
            finally:
                self.model.leave(ticket)

    async def warm_up(self) -> float:
        """Occupy the whole gate once, so that every replica behind it loads its weights."""
        held: list[Ticket] = []
        begun = time.monotonic()
        try:
            while len(held) < self.model.width:
                held.append(await self.model.enter())  # clean: near miss, whatever is in the list is left by the finally
            await asyncio.gather(*(self.client.complete("ping") for _ in held))
        finally:
            for ticket in held:
                self.model.leave(ticket)
        return time.monotonic() - begun

    async def probe(self) -> bool:
        async with self.model.passage():  # clean: context manager
            try:
                await asyncio.wait_for(self.client.complete("ping"), 5.0)
            except asyncio.TimeoutError:
                return False
            return True
