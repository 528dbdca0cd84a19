"""Continuous batcher: requests wait in a queue, take a lane and a token budget, and
leave the batch one by one."""
from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field


class State(enum.Enum):
    QUEUED = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


class Lanes:
    """Bitmap of batch rows."""

    def __init__(self, width: int):
        self.width = width
        self.bits = (1 << width) - 1

    def pick(self) -> int | None:
        if not self.bits:
            return None
        low = self.bits & -self.bits
        self.bits ^= low
        return low.bit_length() - 1

    def unpick(self, lane: int) -> None:
        self.bits |= 1 << lane

    def pick_run(self, n: int) -> list[int] | None:
        got: list[int] = []
        while len(got) < n:
            lane = self.pick()  # clean: near miss, the lanes picked so far are unpicked when the run cannot be met
            if lane is None:
                for g in got:
                    self.unpick(g)
                return None
            got.append(lane)
        return got


class TokenBudget:
    def __init__(self, total: int):
        self.free = total

    def spend(self, n: int) -> bool:
        if n > self.free:
            return False
        self.free -= n
        return True

    def earn(self, n: int) -> None:
        self.free += n


class Over(Exception):
    pass


@dataclass(eq=False)
class Req:
    rid: str
    prompt: list[int]
    max_new: int
    fut: asyncio.Future
    beams: int = 1
    lane: int | None = None
    extra: list[int] = field(default_factory=list)
    budget: int = 0
    state: State = State.QUEUED
    out: list[int] = field(default_factory=list)
    t0: float = field(default_factory=time.monotonic)

    def need(self) -> int:
        return len(self.prompt) + self.max_new


class Batcher:
    def __init__(self, model, lanes: int = 32, tokens: int = 65536, max_wait: float = 20.0):
        self.model = model
        self.lanes = Lanes(lanes)
        self.budget = TokenBudget(tokens)
        self.max_wait = max_wait
        self.queue: asyncio.Queue[Req] = asyncio.Queue()
        self.running: dict[str, Req] = {}
        self.swapped: list[Req] = []
        self.closed = False

    # admission ---------------------------------------------------------
    def _admit(self, req: Req) -> bool:
        lane = self.lanes.pick()  # clean: near miss, unpicked when the budget says no, else carried by the request
        if lane is None:
            return False
        if not self.budget.spend(req.need()):  # clean: moved into req.budget, which _leave earns back
            self.lanes.unpick(lane)
            return False
        req.lane, req.budget = lane, req.need()
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True

    def _admit_beams(self, req: Req) -> bool:
        if not self.budget.spend(req.need() * req.beams):  # leak: not earned back when there is no run of lanes
            return False
        rows = self.lanes.pick_run(req.beams)  # clean: moved into req.lane and req.extra
        if rows is None:
            return False
        req.lane, *req.extra = rows
        req.budget = req.need() * req.beams
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True

    def _leave(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        if req.lane is not None:
            self.lanes.unpick(req.lane)
            req.lane = None
        for lane in req.extra:
            self.lanes.unpick(lane)
        req.extra = []
        self.budget.earn(req.budget)
        req.budget = 0

    async def fill(self) -> None:
        while not self.queue.empty():
            req = self.queue.get_nowait()
            if time.monotonic() - req.t0 > self.max_wait or req.fut.cancelled():
                req.state = State.DONE
                continue
            admit = self._admit_beams if req.beams > 1 else self._admit
            if not admit(req):
                self.queue.put_nowait(req)
                return

    # swap --------------------------------------------------------------
    def swap_out(self, req: Req) -> None:
        if req.extra:
            return  # beams and forks share KV rows, they stay
        self.running.pop(req.rid, None)
        self.lanes.unpick(req.lane)
        req.lane = None
        req.state = State.SWAPPED
        self.swapped.append(req)

    def swap_in(self) -> None:
        still = []
        for req in self.swapped:
            lane = self.lanes.pick()  # leak: a request whose future is done is dropped together with its new lane
            if lane is None:
                still.append(req)
                continue
            if req.fut.done():
                self.budget.earn(req.budget)
                req.budget = 0
                continue
            req.lane = lane
            req.state = State.RUNNING
            self.running[req.rid] = req
        self.swapped = still

    def grow(self, req: Req, more: int) -> bool:
        if not self.budget.spend(more):  # clean: added to req.budget, which _leave earns back
            return False
        req.budget += more
        req.max_new += more
        return True

    def fork(self, req: Req) -> int | None:
        lane = self.lanes.pick()  # leak: not unpicked when the fork's budget is refused
        if lane is None:
            return None
        if not self.grow(req, len(req.out)):  # clean: carried by the request
            return None
        req.extra.append(lane)
        return lane

    def steal(self, victim: Req, req: Req) -> None:
        req.lane = self.lanes.pick()  # leak: rebinding req.lane to the victim's lane loses the picked one
        if req.lane is None or req.lane > victim.lane:
            req.lane, victim.lane = victim.lane, None
        req.state = State.RUNNING
        self.running[req.rid] = req
        self._leave(victim)

    # loop --------------------------------------------------------------
    async def step(self) -> None:
        rows = [r.lane for r in self.running.values()]
        tokens = await self.model.decode(rows)
        for req, tok in zip(list(self.running.values()), tokens):
            req.out.append(tok)
            if tok == self.model.eos or len(req.out) >= req.max_new:
                self._finish(req)

    def _finish(self, req: Req) -> None:
        self._leave(req)
        req.state = State.DONE
        if not req.fut.done():
            req.fut.set_result(req.out)

    def cancel(self, rid: str) -> bool:
        req = self.running.get(rid)
        if req is None:
            return False
        req.fut.cancel()
        self._finish(req)
        return True

    async def score(self, prompt: list[int]) -> float:
        lane = self.lanes.pick()  # leak: kept when the prompt is over the model's window
        if lane is None:
            raise Over("no lane")
        if len(prompt) > self.model.window:
            raise Over("prompt")
        try:
            return await self.model.loglik(lane, prompt)
        finally:
            self.lanes.unpick(lane)
