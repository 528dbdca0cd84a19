"""Batches requests for the reward model and combines several reward heads."""
from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Optional, Sequence

from .permits import Permit, PermitDesk, permitted, permitted_unless
from .requests import ScoreRequest, State

log = logging.getLogger("reward.batcher")


def _digest(prompt: str, answer: str) -> str:
    return hashlib.sha1((prompt + "\x00" + answer).encode()).hexdigest()


class CachedScorer:
    def __init__(self, desk: PermitDesk, model) -> None:
        self.desk = desk
        self.model = model
        self.cache: dict[str, float] = {}

    async def score(self, prompt: str, answer: str) -> float:
        permit = await self.desk.obtain()  # leak: a cache hit returns before the surrender
        key = _digest(prompt, answer)
        if key in self.cache:
            return self.cache[key]
        value = await self.model.score(prompt, answer)
        self.cache[key] = value
        await self.desk.surrender(permit)
        return value

    async def score_pair(self, prompt: str, chosen: str, rejected: str) -> float:
        async with permitted(self.desk, 2) as permit:  # clean: the context manager surrenders it
            log.debug("permit %d", permit.serial)
            a, b = await asyncio.gather(
                self.model.score(prompt, chosen), self.model.score(prompt, rejected))
            return a - b

    async def score_maybe(self, prompt: str, answer: str) -> float:
        key = _digest(prompt, answer)
        async with permitted_unless(self.desk, key in self.cache) as permit:  # clean: released by the manager
            if permit is None:
                return self.cache[key]
            value = await self.model.score(prompt, answer)
            self.cache[key] = value
            return value


async def reserve_for(desk: PermitDesk, requests: Sequence[ScoreRequest]) -> Permit:
    """One permit for the whole batch; the caller surrenders it."""
    weight = max(1, min(8, len(requests)))
    permit = await desk.obtain(weight)  # clean: handed to the caller
    for request in requests:
        request.state = State.RUNNING
    return permit


async def run_batch(desk: PermitDesk, requests: Sequence[ScoreRequest], model) -> list[float]:
    permit = await reserve_for(desk, requests)  # clean: surrendered after the pass
    scores = await model.score_many([(r.prompt, r.answer) for r in requests])
    await desk.surrender(permit)
    for request, score in zip(requests, scores):
        request.score, request.state = score, State.DONE
    return scores


async def score_heads(desk: PermitDesk, request: ScoreRequest, heads: dict) -> Optional[float]:
    total = 0.0
    for name, head in sorted(heads.items()):
        permit = await desk.obtain()  # leak: the break on a veto skips the surrender
        value = await head.score(request.prompt, request.answer)
        if value < -10.0:
            log.info("head %s vetoes", name)
            total = value
            break
        total += value
        await desk.surrender(permit)
    request.score = total
    return total


class CappedLane:
    """Collects permits with their requests; one flush scores at most `limit` of them."""

    def __init__(self, desk: PermitDesk, limit: int) -> None:
        self.desk = desk
        self.limit = limit
        self._lane: list[tuple[ScoreRequest, Permit]] = []

    def push(self, request: ScoreRequest) -> bool:
        permit = self.desk.obtain_nowait()  # leak: flush() surrenders only the first `limit`
        if permit is None:
            return False
        self._lane.append((request, permit))
        return True

    async def flush(self, model) -> int:
        batch = self._lane[: self.limit]
        self._lane = []
        for request, permit in batch:
            request.score = await model.score(request.prompt, request.answer)
            await self.desk.surrender(permit)
        return len(batch)


async def try_twice(desk: PermitDesk, request: ScoreRequest, model) -> bool:
    for attempt in range(2):
        permit = desk.obtain_nowait()  # clean: surrendered in finally, also for the early return
        if permit is None:
            await asyncio.sleep(0.02)
            continue
        try:
            request.score = await asyncio.wait_for(model.score(request.prompt, request.answer), 1.0)
            return True
        except asyncio.TimeoutError:
            log.warning("attempt %d timed out", attempt)
        finally:
            desk.surrender_nowait(permit)
    return False


async def try_until(desk: PermitDesk, request: ScoreRequest, model, attempts: int) -> bool:
    for attempt in range(attempts):
        permit = await desk.obtain()  # leak: the timeout handler goes on to the next try with the permit held
        try:
            request.score = await asyncio.wait_for(model.score(request.prompt, request.answer), 1.0)
        except asyncio.TimeoutError:
            log.warning("attempt %d timed out", attempt)
            continue
        await desk.surrender(permit)
        return True
    return False
