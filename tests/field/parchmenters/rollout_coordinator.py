"""Async rollout coordinator: staleness tickets, engine load, in-flight groups."""
from __future__ import annotations

import asyncio
import heapq
import logging
import random
from dataclasses import dataclass, field

log = logging.getLogger("coordinator")


class StalenessGate:
    """At most ``max_lag`` * batch prompts may run ahead of the trainer."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._given = 0
        self._room = asyncio.Condition()

    async def ticket(self) -> int:
        async with self._room:
            await self._room.wait_for(lambda: self._given < self.capacity)
            self._given += 1
            return self._given

    def ticket_nowait(self) -> int | None:
        if self._given >= self.capacity:
            return None
        self._given += 1
        return self._given

    async def redeem(self, _ticket: int) -> None:
        async with self._room:
            self._given -= 1
            self._room.notify()


@dataclass(order=True)
class Engine:
    load: int
    name: str = field(compare=False)
    client: object = field(compare=False, repr=False, default=None)


class EngineBoard:
    """Picks the least loaded engine and counts what runs on it."""

    def __init__(self, engines: list[Engine], max_load: int):
        self._heap = list(engines)
        heapq.heapify(self._heap)
        self.max_load = max_load

    def pick(self) -> Engine | None:
        if not self._heap or self._heap[0].load >= self.max_load:
            return None
        engine = heapq.heappop(self._heap)  # clean: near miss, pushed back at once with its new load
        engine.load += 1
        heapq.heappush(self._heap, engine)
        return engine

    def pick_named(self, prefix: str) -> Engine | None:
        for engine in self._heap:
            if engine.name.startswith(prefix) and engine.load < self.max_load:
                engine.load += 1
                heapq.heapify(self._heap)
                return engine
        return None

    def unpick(self, engine: Engine) -> None:
        engine.load -= 1
        heapq.heapify(self._heap)


@dataclass
class Prompt:
    pid: str
    text: str
    n: int = 1


@dataclass
class Rollout:
    pid: str
    text: str
    version: int


class Coordinator:
    def __init__(self, gate: StalenessGate, board: EngineBoard):
        self.gate = gate
        self.board = board
        self.inflight: dict[asyncio.Task, int] = {}
        self.out: asyncio.Queue[Rollout] = asyncio.Queue()

    async def generate(self, prompt: Prompt) -> Rollout | None:
        ticket = await self.gate.ticket()  # leak: not redeemed when every engine is full
        engine = self.board.pick()  # clean: unpicked in finally
        if engine is None:
            return None
        try:
            text, version = await engine.client.complete(prompt.text)
            return Rollout(prompt.pid, text, version)
        finally:
            self.board.unpick(engine)
            await self.gate.redeem(ticket)

    async def generate_failover(self, prompt: Prompt, tries: int = 3) -> Rollout | None:
        for _ in range(tries):
            engine = self.board.pick()  # leak: a disconnected engine keeps the load of this try
            if engine is None:
                await asyncio.sleep(random.random())
                continue
            try:
                text, version = await engine.client.complete(prompt.text)
            except ConnectionResetError:
                log.warning("%s went away", engine.name)
                continue
            self.board.unpick(engine)
            return Rollout(prompt.pid, text, version)
        return None

    async def generate_hedged(self, prompt: Prompt) -> Rollout | None:
        first = self.board.pick()  # clean: unpicked in finally
        if first is None:
            return None
        second = self.board.pick()  # clean: near miss, unpicked in finally when it is another lease than None
        try:
            tasks = [asyncio.ensure_future(first.client.complete(prompt.text))]
            if second is not None:
                tasks.append(asyncio.ensure_future(second.client.complete(prompt.text)))
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for t in rest:
                t.cancel()
            text, version = done.pop().result()
            return Rollout(prompt.pid, text, version)
        finally:
            self.board.unpick(first)
            if second is not None:
                self.board.unpick(second)

    async def generate_sticky(self, prompt: Prompt, prefix: str) -> Rollout | None:
        engine = self.board.pick_named(prefix)  # leak: rebound to the general pick when it lags, with its load still counted
        if engine is None or engine.client.lagging:
            engine = self.board.pick()  # clean: unpicked in finally
        if engine is None:
            return None
        try:
            text, version = await engine.client.complete(prompt.text)
            return Rollout(prompt.pid, text, version)
        finally:
            self.board.unpick(engine)

    async def generate_group(self, prompt: Prompt) -> list[Rollout]:
        tickets: list[int] = []
        for _ in range(prompt.n):
            t = self.gate.ticket_nowait()  # clean: all tickets of the list are redeemed on shortage and in finally
            if t is None:
                for held in tickets:
                    await self.gate.redeem(held)
                return []
            tickets.append(t)
        try:
            got = await asyncio.gather(*(self._on_any(prompt) for _ in tickets))
            return [r for r in got if r is not None]
        finally:
            for held in tickets:
                await self.gate.redeem(held)

    async def _on_any(self, prompt: Prompt) -> Rollout | None:
        engine = self.board.pick()  # leak: an empty completion returns before unpick
        if engine is None:
            return None
        text, version = await engine.client.complete(prompt.text)
        if not text:
            return None
        self.board.unpick(engine)
        return Rollout(prompt.pid, text, version)

    # -- background production ------------------------------------------------

    async def launch(self, prompt: Prompt) -> None:
        ticket = await self.gate.ticket()  # leak: harvest() drops the ticket of a task that failed
        task = asyncio.create_task(self.generate_failover(prompt))
        self.inflight[task] = ticket

    async def harvest(self) -> int:
        if not self.inflight:
            return 0
        done, _ = await asyncio.wait(list(self.inflight), return_when=asyncio.FIRST_COMPLETED)
        n = 0
        for task in done:
            ticket = self.inflight.pop(task)
            if task.exception() is not None:
                log.error("rollout failed: %r", task.exception())
                continue
            await self.gate.redeem(ticket)
            rollout = task.result()
            if rollout is not None:
                self.out.put_nowait(rollout)
                n += 1
        return n

    async def produce(self, prompts: list[Prompt]) -> None:
        """One task per prompt; the task owns its ticket from its first line on."""
        tasks = []
        for prompt in prompts:
            ticket = await self.gate.ticket()  # clean: near miss, the task it is given to redeems it in finally
            tasks.append(asyncio.create_task(self._owned(prompt, ticket)))
        await asyncio.gather(*tasks)

    async def _owned(self, prompt: Prompt, ticket: int) -> None:
        try:
            rollout = await self.generate_failover(prompt)
            if rollout is None:
                return
            await self.out.put(rollout)
        finally:
            await self.gate.redeem(ticket)
