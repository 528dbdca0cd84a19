"""Samples in, results out."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from .budget import Budget
from .sandbox import Sandbox, SandboxError, SandboxPool
from .store import Store

log = logging.getLogger("evalfarm")


@dataclass
class Sample:
    id: str
    prompt: str
    kind: str = "code"
    tests: list[str] = field(default_factory=list)
    max_tokens: int = 1024


class Runner:
    def __init__(self, api, budget: Budget, boxes: SandboxPool, store: Store, limit: float = 120.0):
        self.api, self.budget, self.boxes, self.store, self.limit = api, budget, boxes, store, limit
        self.by_suite: dict[str, Sandbox] = {}
        self.timeouts = 0

    async def ask(self, sample: Sample) -> str:
        est = len(sample.prompt) // 3 + sample.max_tokens
        ticket = await self.budget.reserve(est)  # leak: one() cancels us at its time limit, and nothing settles the ticket then
        text, used = await self.api.complete(sample.prompt, sample.max_tokens)
        await ticket.settle(used)
        return text

    async def grade(self, sample: Sample, answer: str) -> bool:
        box = await self.boxes.acquire()  # leak: multiple choice needs no sandbox and returns without releasing it
        if sample.kind == "choice":
            return answer.strip()[:1].upper() == sample.tests[0]
        try:
            for t in sample.tests:
                res = await box.execute(f"{answer}\n{t}", 10.0)
                if not res["ok"]:
                    return False
            return True
        finally:
            self.boxes.release(box)

    async def one(self, suite: str, sample: Sample) -> bool:
        try:
            answer = await asyncio.wait_for(self.ask(sample), self.limit)
            ok = await self.grade(sample, answer)
        except asyncio.TimeoutError:
            self.timeouts += 1
            ok, answer = False, ""
        except SandboxError as e:
            log.error("%s: %s", sample.id, e)
            return False
        await asyncio.to_thread(self.store.save, suite, sample.id, ok, {"answer": answer})
        return ok

    async def judge(self, sample: Sample, answers: list[str]) -> list[bool]:
        """All answers side by side, each in a sandbox of its own."""
        held: list[Sandbox] = []
        try:
            for _ in answers:
                held.append(await self.boxes.acquire())  # clean: near miss, whatever is held is released in the finally
            res = await asyncio.gather(*(b.execute(a, 10.0) for a, b in zip(answers, held)))
            return [r["ok"] for r in res]
        finally:
            for b in held:
                self.boxes.release(b)

    async def warm(self, suite: str, setup: str) -> None:
        """One sandbox a suite with its data loaded."""
        box = await self.boxes.acquire()  # leak: a suite that is warmed again overwrites its entry, and done() releases the last one only
        res = await box.execute(setup, 60.0)
        if not res["ok"]:
            box.tainted = True
            self.boxes.release(box)
            raise SandboxError(f"setup of {suite}: {res['error']}")
        self.by_suite[suite] = box

    def done(self, suite: str) -> None:
        box = self.by_suite.pop(suite, None)
        if box is not None:
            self.boxes.release(box)

    async def background(self, code: str) -> asyncio.Task:
        box = await self.boxes.acquire()  # clean: near miss, released by the callback of the task
        task = asyncio.create_task(box.execute(code, 30.0))
        task.add_done_callback(lambda _: self.boxes.release(box))
        return task

    async def probe(self) -> bool:
        ticket = await self.budget.reserve(16)  # clean: settled in both branches
        try:
            _, used = await self.api.complete("ping", 8)
        except ConnectionError:
            await ticket.settle(0)
            return False
        await ticket.settle(used)
        async with self.boxes.lease() as box:  # clean: the context manager releases
            return (await box.execute("pass", 5.0))["ok"]

    async def suite(self, name: str, samples: list[Sample], width: int = 16) -> float:
        seen = await asyncio.to_thread(self.store.seen, name)
        todo = [s for s in samples if s.id not in seen]
        gate, oks = asyncio.Semaphore(width), 0

        async def go(s: Sample) -> bool:
            async with gate:  # clean: left with the block
                return await self.one(name, s)

        for fut in asyncio.as_completed([go(s) for s in todo]):
            oks += await fut
        self.done(name)
        log.info("%s: %d of %d, %d timeouts", name, oks, len(todo), self.timeouts)
        return oks / max(1, len(todo))
