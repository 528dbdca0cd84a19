"""Asyncio front of the engine: admission gate, output mailboxes and streamed replies."""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable


class AdmissionGate:
    """A weighted semaphore. `enter` waits for room, `leave` gives the weight back."""

    def __init__(self, capacity: int):
        self._room = capacity
        self._changed = asyncio.Condition()
        self.peak = 0

    async def enter(self, weight: int = 1) -> "Pass":
        async with self._changed:
            await self._changed.wait_for(lambda: self._room >= weight)
            self._room -= weight
        return Pass(weight)

    def try_enter(self, weight: int = 1) -> "Pass | None":
        if self._room < weight:
            return None
        self._room -= weight
        return Pass(weight)

    async def leave(self, ticket: "Pass") -> None:
        async with self._changed:
            self._room += ticket.weight
            self._changed.notify_all()

    def leave_now(self, ticket: "Pass") -> None:
        self._room += ticket.weight


@dataclass
class Pass:
    weight: int
    since: float = field(default_factory=time.monotonic)


class Mailboxes:
    """A bounded registry of output queues, one per live request."""

    def __init__(self, limit: int):
        self.limit = limit
        self._ids = itertools.count()
        self.boxes: dict[int, asyncio.Queue] = {}

    def subscribe(self) -> int | None:
        if len(self.boxes) >= self.limit:
            return None
        box = next(self._ids)
        self.boxes[box] = asyncio.Queue()
        return box

    def unsubscribe(self, box: int) -> None:
        self.boxes.pop(box, None)


@dataclass
class Job:
    prompt: str
    max_tokens: int
    best_of: int = 1
    box: int | None = None
    ticket: Pass | None = None


Backend = Callable[[Job, asyncio.Queue], Awaitable[None]]


class StreamEngine:
    def __init__(self, backend: Backend, capacity: int, boxes: int):
        self.backend = backend
        self.gate = AdmissionGate(capacity)
        self.mail = Mailboxes(boxes)
        self.jobs: dict[int, Job] = {}
        self.tasks: set[asyncio.Task] = set()
        self.served = 0

    async def complete(self, job: Job) -> list[str]:
        ticket = await self.gate.enter(job.best_of)  # clean: left in finally
        try:
            box = self.mail.subscribe()  # clean: unsubscribed after the backend is done
            if box is None:
                return []
            queue = self.mail.boxes[box]
            await self.backend(job, queue)
            out = [queue.get_nowait() for _ in range(queue.qsize())]
            self.mail.unsubscribe(box)
            self.served += 1
            return out
        finally:
            await self.gate.leave(ticket)

    async def complete_quick(self, job: Job) -> list[str]:
        ticket = self.gate.try_enter(job.best_of)  # leak: no mailbox means a return with the pass held
        if ticket is None:
            return []
        box = self.mail.subscribe()  # clean: unsubscribed before the reply
        if box is None:
            return ["busy"]
        queue = self.mail.boxes[box]
        await self.backend(job, queue)
        out = [queue.get_nowait() for _ in range(queue.qsize())]
        self.mail.unsubscribe(box)
        await self.gate.leave(ticket)
        return out

    async def stream(self, job: Job) -> AsyncIterator[str]:
        box = self.mail.subscribe()  # leak: the end-of-stream marker returns without unsubscribe
        if box is None:
            return
        queue = self.mail.boxes[box]
        runner = asyncio.create_task(self.backend(job, queue))
        for _ in range(job.max_tokens):
            piece = await queue.get()
            if piece is None:
                await runner
                return
            yield piece
        await runner
        self.mail.unsubscribe(box)

    async def stream_scoped(self, job: Job) -> AsyncIterator[str]:
        box = self.mail.subscribe()  # clean: near miss, finally covers every way out of the generator
        if box is None:
            return
        try:
            queue = self.mail.boxes[box]
            runner = asyncio.create_task(self.backend(job, queue))
            while (piece := await queue.get()) is not None:
                yield piece
            await runner
        finally:
            self.mail.unsubscribe(box)

    async def submit(self, job: Job) -> int | None:
        job.ticket = await self.gate.enter(job.best_of)  # clean: near miss, refused here or left by retire
        job.box = self.mail.subscribe()  # clean: kept in the job, retire unsubscribes
        if job.box is None:
            await self.gate.leave(job.ticket)
            job.ticket = None
            return None
        self.jobs[job.box] = job
        return job.box

    async def retire(self, box: int) -> None:
        job = self.jobs.pop(box)
        if job.box is not None:
            self.mail.unsubscribe(job.box)
        if job.ticket is not None:
            await self.gate.leave(job.ticket)
            job.ticket = None

    async def spawn(self, job: Job) -> None:
        ticket = await self.gate.enter()  # clean: near miss, the done callback leaves the gate
        task = asyncio.create_task(self.backend(job, asyncio.Queue()))
        self.tasks.add(task)

        def _finished(t: asyncio.Task, held: Pass = ticket) -> None:
            self.tasks.discard(t)
            self.gate.leave_now(held)

        task.add_done_callback(_finished)

    async def spawn_background(self, job: Job) -> None:
        ticket = await self.gate.enter()  # leak: the callback forgets the task but never leaves the gate
        task = asyncio.create_task(self.backend(job, asyncio.Queue()), name=f"bg-{ticket.weight}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @contextlib.asynccontextmanager
    async def admitted(self, weight: int) -> AsyncIterator[Pass]:
        ticket = await self.gate.enter(weight)  # clean: left when the block ends
        try:
            yield ticket
        finally:
            await self.gate.leave(ticket)

    async def embed(self, job: Job) -> list[float]:
        async with self.admitted(1) as ticket:  # clean: the async context manager leaves the gate
            if not job.prompt:
                return []
            return [float(ord(c)) / ticket.weight for c in job.prompt]

    async def enter_patiently(self, weight: int, attempts: int) -> Pass | None:
        for i in range(attempts):
            ticket = self.gate.try_enter(weight)  # clean: near miss, None is retried, a pass is handed on
            if ticket is not None:
                return ticket
            await asyncio.sleep(0.01 * 2 ** i)
        return None

    async def tokenize(self, job: Job) -> list[str] | None:
        ticket = await self.enter_patiently(1, attempts=4)  # leak: the empty prompt returns before leave
        if ticket is None:
            return None
        words = job.prompt.split()
        if not words:
            return []
        await self.gate.leave(ticket)
        return words

    async def tokenize_many(self, jobs: list[Job], limit: int) -> dict[str, int]:
        lengths: dict[str, int] = {}
        for job in jobs:
            ticket = await self.enter_patiently(1, attempts=2)  # leak: the break at the limit skips leave
            if ticket is None:
                break
            lengths[job.prompt] = len(job.prompt.split())
            if sum(lengths.values()) > limit:
                break
            await self.gate.leave(ticket)
        return lengths

    async def race(self, jobs: list[Job]) -> Any:
        passes = [await self.gate.enter(j.best_of) for j in jobs]  # leak: only the winner's pass is left
        tasks = [asyncio.create_task(self.backend(j, asyncio.Queue())) for j in jobs]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        winner = tasks.index(next(iter(done)))
        await self.gate.leave(passes[winner])
        return tasks[winner].result()

    async def race_all(self, jobs: list[Job]) -> int:
        passes = [await self.gate.enter(j.best_of) for j in jobs]  # clean: every pass is left in finally
        try:
            tasks = [asyncio.create_task(self.backend(j, asyncio.Queue())) for j in jobs]
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            return tasks.index(next(iter(done)))
        finally:
            for ticket in passes:
                await self.gate.leave(ticket)
