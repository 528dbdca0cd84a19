"""Async front of an inference server: admission permits, decode lanes, and streaming replies."""
from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Dict, List, Optional


class Admission:
    """Weighted permits; `admit` waits, `try_admit` does not."""

    def __init__(self, total: int):
        self._left = total
        self._waiters: List[asyncio.Future] = []

    async def admit(self, weight: int) -> int:
        while self._left < weight:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        self._left -= weight
        return weight

    def try_admit(self, weight: int) -> int:
        """The weight, or 0."""
        if self._left < weight:
            return 0
        self._left -= weight
        return weight

    def leave(self, weight: int) -> None:
        self._left += weight
        for fut in self._waiters:
            if not fut.done():
                fut.set_result(None)
        self._waiters.clear()


class Lanes:
    """Decode lanes of the batch; one per running request."""

    def __init__(self, n: int):
        self._idle: "asyncio.Queue[int]" = asyncio.Queue()
        for i in range(n):
            self._idle.put_nowait(i)

    async def enter(self) -> int:
        return await self._idle.get()

    def enter_now(self) -> Optional[int]:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def exit(self, lane: int) -> None:
        self._idle.put_nowait(lane)

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[int]:
        i = await self.enter()  # clean: exited in finally
        try:
            yield i
        finally:
            self.exit(i)


@dataclass
class Request:
    prompt: List[int]
    limit: int = 128
    stream: bool = False
    ident: int = field(default_factory=itertools.count().__next__)
    lane: Optional[int] = None
    weight: int = 0


class Gateway:
    def __init__(self, admission: Admission, lanes: Lanes, model: Any):
        self.admission = admission
        self.lanes = lanes
        self.model = model
        self._streams: Dict[int, Request] = {}
        self._tasks: Dict[int, asyncio.Task] = {}

    async def complete(self, req: Request) -> List[int]:
        w = await self.admission.admit(len(req.prompt))  # clean: left in finally
        try:
            async with self.lanes.lane() as lane:  # clean: exited with the block
                return await self.model.generate(lane, req.prompt, req.limit)
        finally:
            self.admission.leave(w)

    async def classify(self, req: Request) -> Optional[int]:
        w = self.admission.try_admit(len(req.prompt))  # leak: with no idle lane it returns without leaving
        if not w:
            return None
        lane = self.lanes.enter_now()  # clean: exited below, or None
        if lane is None:
            return None
        label = await self.model.classify(lane, req.prompt)
        self.lanes.exit(lane)
        self.admission.leave(w)
        return label

    async def score(self, req: Request, choices: List[List[int]]) -> List[float]:
        scores: List[float] = []
        lane = await self.lanes.enter()  # clean: near miss, the break leads to the exit too
        for choice in choices:
            w = self.admission.try_admit(len(choice))  # clean: left at the end of the turn, or 0
            if not w:
                break
            scores.append(await self.model.score(lane, req.prompt + choice))
            self.admission.leave(w)
        self.lanes.exit(lane)
        return scores

    async def score_until(self, req: Request, choices: List[List[int]], bar: float) -> Optional[int]:
        lane = await self.lanes.enter()  # clean: near miss, both returns exit it
        for i, choice in enumerate(choices):
            w = await self.admission.admit(len(choice))  # leak: the return for a good one does not leave
            s = await self.model.score(lane, req.prompt + choice)
            if s >= bar:
                self.lanes.exit(lane)
                return i
            self.admission.leave(w)
        self.lanes.exit(lane)
        return None

    async def open_stream(self, req: Request) -> int:
        req.weight = await self.admission.admit(len(req.prompt))  # clean: near miss, close_stream leaves
        req.lane = await self.lanes.enter()  # clean: near miss, close_stream exits it
        self._streams[req.ident] = req
        return req.ident

    async def chunks(self, ident: int) -> AsyncIterator[List[int]]:
        req = self._streams[ident]
        produced = 0
        while produced < req.limit:
            chunk = await self.model.decode(req.lane)
            if not chunk:
                break
            produced += len(chunk)
            yield chunk
        self.close_stream(ident)

    def close_stream(self, ident: int) -> None:
        req = self._streams.pop(ident, None)
        if req is None:
            return
        self.lanes.exit(req.lane)
        self.admission.leave(req.weight)
        req.lane = None

    async def resume(self, req: Request) -> bool:
        """Reconnected client: a stream that is running goes on in the lane it has."""
        lane = self.lanes.enter_now()  # leak: when the stream runs already the new lane is not exited
        if lane is None:
            return False
        if req.ident in self._streams:
            return True
        req.lane = lane
        req.weight = await self.admission.admit(len(req.prompt))  # clean: close_stream leaves
        self._streams[req.ident] = req
        return True

    async def background(self, req: Request) -> asyncio.Task:
        """The task owns the lane."""
        lane = await self.lanes.enter()  # clean: near miss, the done callback of the task exits it
        task = asyncio.create_task(self.model.generate(lane, req.prompt, req.limit))
        task.add_done_callback(lambda t: self.lanes.exit(lane))
        self._tasks[req.ident] = task
        task.add_done_callback(lambda t: self._tasks.pop(req.ident, None))
        return task

    async def background_quiet(self, req: Request) -> None:
        lane = await self.lanes.enter()  # leak: the callback only forgets the task
        task = asyncio.create_task(self.model.generate(lane, req.prompt, req.limit))
        self._tasks[req.ident] = task
        task.add_done_callback(lambda t: self._tasks.pop(req.ident, None))

    async def _run_in(self, lane: int, req: Request) -> List[int]:
        """Takes the lane over."""
        try:
            return await self.model.generate(lane, req.prompt, req.limit)
        finally:
            self.lanes.exit(lane)

    async def fan_out(self, reqs: List[Request]) -> List[List[int]]:
        jobs = []
        for req in reqs:
            lane = await self.lanes.enter()  # clean: near miss, _run_in exits it
            jobs.append(asyncio.create_task(self._run_in(lane, req)))
        return await asyncio.gather(*jobs)

    async def warm(self, lengths: List[int]) -> float:
        """Compiles graphs for the given prompt lengths."""
        seconds = 0.0
        for n in lengths:
            lane = self.lanes.enter_now()  # leak: a length with a graph goes on without exit
            if lane is None:
                break
            if self.model.has_graph(n):
                continue
            seconds += await self.model.compile(lane, n)
            self.lanes.exit(lane)
        return seconds

    async def drain(self) -> None:
        for ident in list(self._streams):
            self.close_stream(ident)
        if self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
