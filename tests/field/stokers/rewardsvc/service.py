from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Awaitable, Callable, Dict, List, Optional

from .budget import TokenBudget
from .sandboxes import Sandbox, SandboxPool

logger = logging.getLogger(__name__)

Judge = Callable[[str, str], Awaitable[Optional[float]]]


@dataclass
class Episode:
    tenant: str
    box: Sandbox
    turns: int = 0


class RewardService:
    def __init__(self, pool: SandboxPool, budget: TokenBudget, judge: Judge, timeout: float) -> None:
        self.pool = pool
        self.budget = budget
        self.judge = judge
        self.timeout = timeout
        self.episodes: Dict[str, Episode] = {}

    async def run_tests(self, language: str, code: str) -> Optional[float]:
        box = await self.pool.check_out(language)  # clean: near miss, the handled timeout and cancellation pass the finally
        try:
            rc = await asyncio.wait_for(box.execute(code), self.timeout)
            return float(rc == 0)
        except asyncio.TimeoutError:
            return None
        finally:
            await self.pool.check_in(box)

    async def run_cases(self, language: str, cases: List[str]) -> float:
        passed = 0
        for code in cases:
            box = await self.pool.check_out(language)  # leak: a case that times out continues without the check-in
            try:
                rc = await asyncio.wait_for(box.execute(code), self.timeout)
            except asyncio.TimeoutError:
                logger.info("case timed out in sandbox %d", box.number)
                continue
            passed += rc == 0
            await self.pool.check_in(box)
        return passed / max(len(cases), 1)

    async def judge_one(self, tenant: str, prompt: str, answer: str) -> Optional[float]:
        cost = len(prompt) + len(answer)
        if not self.budget.earmark(tenant, cost):  # leak: only the length of the answer is unmarked
            return None
        try:
            return await self.judge(prompt, answer)
        finally:
            self.budget.unmark(tenant, len(answer))

    async def judge_best(self, tenant: str, prompt: str, answers: List[str]) -> Optional[float]:
        cost = sum(len(prompt) + len(a) for a in answers)
        if not self.budget.earmark(tenant, cost):  # clean: near miss, the sum is unmarked part by part
            return None
        best: Optional[float] = None
        for answer in answers:
            score = await self.judge(prompt, answer)
            self.budget.unmark(tenant, len(prompt) + len(answer))
            if score is None:
                continue
            best = score if best is None else max(best, score)
        return best

    async def open_episode(self, key: str, tenant: str, language: str, tokens: int) -> bool:
        if not self.budget.earmark(tenant, tokens):  # leak: with no idle sandbox the earmarked tokens stay marked
            return False
        box = self.pool.check_out_nowait(language)  # clean: near miss, a known key checks it in again, otherwise kept in the episode
        if box is None:
            return False
        if key in self.episodes:
            self.budget.unmark(tenant, tokens)
            await self.pool.check_in(box)
            return False
        self.budget.unmark(tenant, tokens)
        self.episodes[key] = Episode(tenant, box)
        return True

    async def turn(self, key: str, code: str, limit: int) -> Optional[int]:
        episode = self.episodes.get(key)
        if episode is None:
            return None
        episode.turns += 1
        rc = await episode.box.execute(code)
        if rc != 0 or episode.turns >= limit:
            await self.close_episode(key)
        return rc

    async def restart(self, key: str) -> bool:
        episode = self.episodes.get(key)
        if episode is None:
            return False
        fresh = self.pool.check_out_nowait(episode.box.language)  # clean: near miss, the episode's former sandbox is checked in from its copy
        if fresh is None:
            return False
        old, episode.box = episode.box, fresh
        episode.turns = 0
        await self.pool.check_in(old)
        return True

    async def compare(self, left: str, right: str, code: str) -> Optional[bool]:
        a = self.pool.check_out_nowait(left)  # leak: the return for the missing second sandbox forgets the first
        b = self.pool.check_out_nowait(right)  # clean: near miss, checked in where the first is missing
        if a is None:
            if b is not None:
                await self.pool.check_in(b)
            return None
        if b is None:
            return None
        results = await asyncio.gather(a.execute(code), b.execute(code), return_exceptions=True)
        await self.pool.check_in(a)
        await self.pool.check_in(b)
        return results[0] == results[1]

    async def close_episode(self, key: str) -> None:
        episode = self.episodes.pop(key, None)
        if episode is not None:
            await self.pool.check_in(episode.box)

    async def close(self) -> None:
        for key in list(self.episodes):
            await self.close_episode(key)
