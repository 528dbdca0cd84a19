"""Continuous batching for rollouts, and the asynchronous front of it."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Awaitable, Callable, Deque, Dict, List, Optional

from .memory import Lane, LanePool
from .request import Request, RequestState

log = logging.getLogger("rollout")

Sampler = Callable[[Request], Optional[int]]


class RolloutEngine:
    def __init__(self, pool: LanePool, sampler: Sampler, max_batch: int = 8) -> None:
        self.pool = pool
        self.sampler = sampler
        self.max_batch = max_batch
        self.waiting: Deque[Request] = deque()
        self.running: Dict[int, Request] = {}
        self.rejected: List[int] = []

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def schedule(self) -> int:
        """Fills the batch from the waiting queue."""
        started = 0
        while self.waiting and len(self.running) < self.max_batch:
            req = self.waiting[0]
            lane = self.pool.checkout_lane(req.want)  # clean: near miss, break for None only, else moved into the running request
            if lane is None:
                break
            self.waiting.popleft()
            req.attach(lane)
            self.running[req.rid] = req
            started += 1
        return started

    def schedule_fair(self, budget: int) -> int:
        started = 0
        for _ in range(len(self.waiting)):
            req = self.waiting.popleft()
            lane = self.pool.checkout_lane(req.want)  # leak: a request over the budget is requeued without its lane
            if lane is None:
                self.waiting.append(req)
                continue
            if req.want > budget:
                self.waiting.append(req)
                continue
            budget -= req.want
            req.attach(lane)
            self.running[req.rid] = req
            started += 1
        return started

    def finish(self, rid: int, state: RequestState = RequestState.DONE) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        req.state = state
        req.detach(self.pool)

    def step(self) -> List[int]:
        done = []
        for rid, req in list(self.running.items()):
            token = self.sampler(req)
            if token is None or len(req.output) >= req.max_new:
                self.finish(rid)
                done.append(rid)
                continue
            req.output.append(token)
            req.lane.length += 1
        return done

    def preempt(self, rid: int) -> None:
        req = self.running.pop(rid)
        req.detach(self.pool)
        req.state = RequestState.PREEMPTED
        self.waiting.appendleft(req)

    def resume_now(self, req: Request) -> bool:
        """Brings a preempted request back without the queue, if it is still wanted."""
        lane = self.pool.checkout_lane(req.want)  # leak: a request meanwhile failed is turned away with the lane out
        if lane is None:
            return False
        if req.state is not RequestState.PREEMPTED:
            self.rejected.append(req.rid)
            return False
        self.waiting.remove(req)
        req.attach(lane)
        self.running[req.rid] = req
        return True

    def fork_group(self, req: Request, n: int) -> List[Request]:
        """n samples of one prompt, all or none."""
        group: List[Request] = []
        for i in range(n):
            child = Request(req.rid * 1000 + i, list(req.prompt), req.max_new)
            lane = self.pool.checkout_lane(child.want)  # clean: near miss, members so far are detached when one is refused
            if lane is None:
                for member in group:
                    member.detach(self.pool)
                return []
            child.attach(lane)
            group.append(child)
        for child in group:
            self.running[child.rid] = child
        return group

    def fork_best_effort(self, req: Request, n: int) -> int:
        group: List[Request] = []
        for i in range(n):
            child = Request(req.rid * 1000 + i, list(req.prompt), req.max_new)
            lane = self.pool.checkout_lane(child.want)  # leak: fewer than two members return with their lanes in a local list
            if lane is None:
                break
            child.attach(lane)
            group.append(child)
        if len(group) < 2:
            log.info("group of %d too small", len(group))
            return 0
        self.running.update((c.rid, c) for c in group)
        return len(group)

    def abort_all(self) -> None:
        for rid in list(self.running):
            self.finish(rid, RequestState.FAILED)


class AsyncFront:
    """Limits rollouts in flight and runs each as a task."""

    def __init__(self, engine: RolloutEngine, limit: int) -> None:
        self.engine = engine
        self.pool = engine.pool
        self._permits = asyncio.Semaphore(limit)
        self._tasks: Dict[int, "asyncio.Task[None]"] = {}
        self.results: Dict[int, List[int]] = {}

    async def _drive(self, req: Request, lane: Lane) -> None:
        try:
            for _ in range(req.max_new):
                token = self.engine.sampler(req)
                if token is None:
                    return
                lane.length += 1
                req.output.append(token)
                await asyncio.sleep(0)
        finally:
            self.results[req.rid] = req.output
            self.pool.return_lane(lane)
            self._permits.release()

    async def launch(self, req: Request) -> bool:
        await self._permits.acquire()  # clean: released when there is no lane, else by the task
        lane = self.pool.checkout_lane(req.want)  # clean: near miss, the task returns it in its finally
        if lane is None:
            self._permits.release()
            return False
        self._tasks[req.rid] = asyncio.create_task(self._drive(req, lane))
        return True

    async def launch_unique(self, req: Request) -> bool:
        await self._permits.acquire()  # leak: a request already launched returns without a release
        if req.rid in self._tasks:
            return False
        lane = self.pool.checkout_lane(req.want)  # clean: None-checked, the task returns it
        if lane is None:
            self._permits.release()
            return False
        self._tasks[req.rid] = asyncio.create_task(self._drive(req, lane))
        return True

    async def score(self, req: Request, judge: Callable[[Request], Awaitable[float]]) -> float:
        lane = self.pool.checkout_lane(req.want)  # leak: the time-out is survived with the lane out
        if lane is None:
            return 0.0
        try:
            value = await asyncio.wait_for(judge(req), timeout=0.05)
        except asyncio.TimeoutError:
            return 0.0
        self.pool.return_lane(lane)
        return value

    async def join(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        await asyncio.gather(*tasks)
