"""Score requests carry their permit from admission until they are finished."""
from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import Optional

from .permits import Permit, PermitDesk


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass
class ScoreRequest:
    prompt: str
    answer: str
    permit: Optional[Permit] = None
    state: State = State.QUEUED
    score: float = 0.0
    created: float = field(default_factory=time.monotonic)


class AdmissionTable:
    """Plain requests. Every one ends in finish() or in cancel()."""

    def __init__(self, desk: PermitDesk) -> None:
        self.desk = desk
        self._live: dict[int, ScoreRequest] = {}
        self._next = 0

    async def admit(self, prompt: str, answer: str) -> int:
        request = ScoreRequest(prompt, answer)
        request.permit = await self.desk.obtain()  # clean: finish() and cancel() both surrender it
        key = self._next
        self._next += 1
        self._live[key] = request
        return key

    async def finish(self, key: int, score: float) -> ScoreRequest:
        request = self._live.pop(key)
        request.state, request.score = State.DONE, score
        await self.desk.surrender(request.permit)
        return request

    async def cancel(self, key: int) -> bool:
        request = self._live.pop(key, None)
        if request is None:
            return False
        request.state = State.CANCELLED
        await self.desk.surrender(request.permit)
        return True


class PriorityTable:
    """Requests of the online evaluator, with a deadline."""

    def __init__(self, desk: PermitDesk, budget_s: float) -> None:
        self.desk = desk
        self.budget_s = budget_s
        self._live: dict[str, ScoreRequest] = {}
        self.expired = 0

    async def admit(self, tag: str, prompt: str, answer: str) -> bool:
        if tag in self._live:
            return False
        permit = await self.desk.obtain(2)  # leak: expire() deletes the entry without surrendering its permit
        self._live[tag] = ScoreRequest(prompt, answer, permit)
        return True

    async def finish(self, tag: str, score: float) -> float:
        request = self._live.pop(tag, None)
        if request is None:
            return 0.0
        request.score = score
        await self.desk.surrender(request.permit)
        return score

    def expire(self) -> int:
        now = time.monotonic()
        late = [tag for tag, r in self._live.items() if now - r.created > self.budget_s]
        for tag in late:
            request = self._live.pop(tag)
            request.state = State.CANCELLED
            self.expired += 1
        return len(late)


async def score_detached(desk: PermitDesk, request: ScoreRequest, model) -> asyncio.Task:
    """The task takes the permit over."""
    permit = await desk.obtain()  # clean: near miss, the task's callback surrenders it

    async def body() -> float:
        request.state = State.RUNNING
        request.score = await model.score(request.prompt, request.answer)
        return request.score

    task = asyncio.ensure_future(body())
    task.add_done_callback(lambda _t: desk.surrender_nowait(permit))
    return task
