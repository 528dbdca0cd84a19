"""Runs an evaluation set against a model API and grades the answers.

Tokens per minute are reserved ahead of a request and settled with what it
really used.  Code answers are executed in sandboxes from a small pool.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Dict, List, Optional

logger = logging.getLogger("evals")


class RateLimited(Exception):
    def __init__(self, retry_after: float):
        super().__init__(f"retry in {retry_after:.1f} s")
        self.retry_after = retry_after


class BadAnswer(Exception): ...
class SandboxBroken(Exception): ...


class TokenBudget:
    def __init__(self, per_minute: int):
        self.per_minute = per_minute
        self.available = per_minute
        self._changed = asyncio.Condition()

    async def reserve(self, tokens: int) -> "Held":
        async with self._changed:
            await self._changed.wait_for(lambda: self.available >= tokens)
            self.available -= tokens
        return Held(self, tokens)  # clean: goes to the caller

    def try_reserve(self, tokens: int) -> Optional["Held"]:
        if self.available < tokens:
            return None
        self.available -= tokens
        return Held(self, tokens)  # clean: goes to the caller

    async def _credit(self, tokens: int) -> None:
        async with self._changed:
            self.available += tokens
            self._changed.notify_all()


class Held:
    def __init__(self, budget: TokenBudget, tokens: int):
        self.budget = budget
        self.tokens = tokens
        self.closed = False

    async def settle(self, used: int) -> None:
        if self.closed:
            return
        self.closed = True
        await self.budget._credit(max(0, self.tokens - used))
        loop = asyncio.get_running_loop()
        back = min(used, self.tokens)
        loop.call_later(60, lambda: asyncio.ensure_future(self.budget._credit(back)))

    async def cancel(self) -> None:
        if not self.closed:
            self.closed = True
            await self.budget._credit(self.tokens)


class SandboxPool:
    def __init__(self, runtime, size: int):
        self.runtime = runtime
        self.size = size
        self._made = 0
        self._ready: asyncio.Queue = asyncio.Queue()

    async def borrow(self):
        if self._ready.empty() and self._made < self.size:
            self._made += 1
            return await self.runtime.create_container(network=False)  # clean: goes to the caller
        box = await self._ready.get()  # leak: a box that cannot be reset is neither destroyed nor subtracted from _made when this raises
        if not await self.runtime.reset(box):
            raise SandboxBroken(box.name)
        return box

    async def hand_back(self, box, broken: bool = False) -> None:
        if broken:
            self._made -= 1
            await self.runtime.destroy(box)
        else:
            self._ready.put_nowait(box)

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Any]:
        box = await self.borrow()  # clean: near miss, handed back on both ways out
        try:
            yield box
        except SandboxBroken:
            await self.hand_back(box, broken=True)
            raise
        except BaseException:
            await self.hand_back(box)
            raise
        else:
            await self.hand_back(box)

    async def drain(self) -> None:
        while not self._ready.empty():
            box = self._ready.get_nowait()  # clean: destroyed in the next line
            await self.runtime.destroy(box)


@dataclass
class Sample:
    key: str
    prompt: str
    kind: str
    answer: str
    max_tokens: int = 512


@dataclass
class Score:
    key: str
    correct: bool
    seconds: float


@dataclass
class Report:
    scores: List[Score] = field(default_factory=list)
    skipped: List[str] = field(default_factory=list)


def estimate(sample: Sample) -> int:
    return len(sample.prompt) // 3 + sample.max_tokens


class Runner:
    def __init__(self, api, budget: TokenBudget, boxes: SandboxPool, parallel: int = 16, judge=None):
        self.api = api
        self.budget = budget
        self.boxes = boxes
        self.judge = judge
        self.gate = asyncio.Semaphore(parallel)
        self.report = Report()
        self._sessions: Dict[str, Any] = {}

    async def _ask(self, sample: Sample, held: Held) -> str:
        reply = await self.api.complete(sample.prompt, sample.max_tokens)
        if reply.status == 429:
            raise RateLimited(reply.retry_after)
        await held.settle(reply.usage)
        if not reply.text.strip():
            raise BadAnswer("empty")
        return reply.text

    async def _answer(self, sample: Sample, tries: int = 4) -> str:
        for n in range(tries):
            held = await self.budget.reserve(estimate(sample))  # leak: a rate-limited request is tried again with a new reservation, this one is open still
            try:
                return await self._ask(sample, held)
            except RateLimited as exc:
                await asyncio.sleep(exc.retry_after + random.random() * n)
        raise BadAnswer("rate limited")

    async def _answer_once(self, sample: Sample) -> Optional[str]:
        held = self.budget.try_reserve(estimate(sample))  # clean: near miss, None holds nothing, settle() comes first and makes cancel() a no-op
        if held is None:
            return None
        try:
            return await self._ask(sample, held)
        except (RateLimited, BadAnswer):
            return None
        finally:
            await held.cancel()

    async def _execute(self, sample: Sample, code: str) -> bool:
        box = await self.boxes.borrow()  # leak: the timeout is answered with False, and the box is still the borrower's
        try:
            out = await asyncio.wait_for(self.boxes.runtime.run(box, code), timeout=20)
        except asyncio.TimeoutError:
            return False
        await self.boxes.hand_back(box, broken=out.exit_code == 137)
        return out.stdout.strip() == sample.answer

    async def _judge(self, sample: Sample, text: str) -> bool:
        cost = len(text) // 3 + 16
        held = await self.budget.reserve(cost)  # clean: settled or cancelled
        try:
            verdict = await self.judge(sample.prompt, text, sample.answer)
        except RateLimited:
            await held.cancel()
            return False
        await held.settle(cost)
        return verdict

    async def grade(self, sample: Sample, text: str) -> bool:
        if sample.kind == "code":
            return await self._execute(sample, text)
        if sample.kind == "judged" and self.judge is not None:
            return await self._judge(sample, text)
        if sample.kind == "tests":
            async with self.boxes.sandbox() as box:  # clean: the return and the BadAnswer pass through the context manager
                result = await self.boxes.runtime.run(box, text + "\n" + sample.answer)
                if result.exit_code == 126:
                    raise BadAnswer("not executable")
                return result.exit_code == 0
        return text.strip() == sample.answer

    async def one(self, sample: Sample) -> None:
        await self.gate.acquire()  # leak: the return for answers that are bad goes past the release
        began = time.monotonic()
        try:
            text = await self._answer(sample)
            correct = await self.grade(sample, text)
        except (BadAnswer, SandboxBroken) as exc:
            self.report.skipped.append(f"{sample.key}: {exc}")
            return
        self.report.scores.append(Score(sample.key, correct, time.monotonic() - began))
        self.gate.release()

    async def dialogue(self, user: str, turns: List[Sample]) -> int:
        session = await self.api.open_session(user)  # leak: the entry is popped without a close when a turn is bad
        self._sessions[user] = session
        good = 0
        for turn in turns:
            try:
                text = await self._answer(turn)
            except BadAnswer:
                self._sessions.pop(user)
                return good
            good += text.strip() == turn.answer
        await self._sessions.pop(user).close()
        return good

    async def warm_boxes(self, n: int) -> None:
        boxes = []
        try:
            for _ in range(n):
                boxes.append(await self.boxes.borrow())  # clean: near miss, those in hand are handed back whether or not the last was broken
        except SandboxBroken as exc:
            logger.warning("%s is broken", exc)
        for box in boxes:
            await self.boxes.hand_back(box)


async def evaluate(path: str, runner: Runner) -> Report:
    with open(path) as lines:  # clean: with
        samples = [Sample(**json.loads(line)) for line in lines]
    try:
        await asyncio.gather(*(runner.one(s) for s in samples))
    finally:
        await runner.boxes.drain()
    return runner.report
