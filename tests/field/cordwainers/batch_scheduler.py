"""Continuous batching: each running request holds a batch slot and a share of the token budget."""
from __future__ import annotations

import enum
import heapq
import itertools
import logging
import time
from dataclasses import dataclass, field

log = logging.getLogger("serve.sched")


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    DONE = 3


class SlotTable:
    """Rows of the batch tensors."""

    def __init__(self, n: int) -> None:
        self._open = list(range(n))
        heapq.heapify(self._open)
        self.width = n

    def claim(self) -> int | None:
        return heapq.heappop(self._open) if self._open else None

    def vacate(self, slot: int) -> None:
        heapq.heappush(self._open, slot)


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.left = total

    def reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


@dataclass(order=True)
class Request:
    priority: int
    rid: int
    prompt_len: int = field(compare=False, default=0)
    max_new: int = field(compare=False, default=0)
    slot: int | None = field(compare=False, default=None)
    reserved: int = field(compare=False, default=0)
    state: State = field(compare=False, default=State.WAITING)
    deadline: float = field(compare=False, default=float("inf"))
    produced: int = field(compare=False, default=0)

    @property
    def footprint(self) -> int:
        return self.prompt_len + self.max_new


class Scheduler:
    def __init__(self, slots: SlotTable, budget: TokenBudget) -> None:
        self.slots = slots
        self.budget = budget
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.paused: dict[int, Request] = {}
        self._tick = itertools.count()

    def enqueue(self, req: Request) -> None:
        heapq.heappush(self.waiting, req)

    def admit(self) -> list[Request]:
        fresh: list[Request] = []
        while self.waiting:
            req = self.waiting[0]
            slot = self.slots.claim()  # clean: vacated when the budget refuses, else kept by the request
            if slot is None:
                break
            if not self.budget.reserve(req.footprint):  # clean: kept in req.reserved, finish refunds it
                self.slots.vacate(slot)
                break
            heapq.heappop(self.waiting)
            req.slot, req.reserved, req.state = slot, req.footprint, State.RUNNING
            self.running[req.rid] = req
            fresh.append(req)
        return fresh

    def admit_express(self, req: Request) -> bool:
        """Health probes and other one-token requests jump the queue."""
        if not self.budget.reserve(1):  # leak: without a slot it returns False and the token is not refunded
            return False
        slot = self.slots.claim()  # clean: kept by the running request, finish vacates it
        if slot is None:
            self.enqueue(req)
            return False
        req.slot, req.reserved, req.state = slot, 1, State.RUNNING
        self.running[req.rid] = req
        return True

    def finish(self, rid: int) -> Request | None:
        req = self.running.pop(rid, None)
        if req is None:
            return None
        self.slots.vacate(req.slot)
        self.budget.refund(req.reserved)
        req.slot, req.reserved, req.state = None, 0, State.DONE
        return req

    def expire(self, now: float) -> list[int]:
        late = [r.rid for r in self.running.values() if r.deadline < now]
        for rid in late:
            self.finish(rid)
        return late

    # -- pausing: keeps the budget, gives the row to somebody else ------------------------
    def pause(self, rid: int) -> None:
        req = self.running.pop(rid)
        self.slots.vacate(req.slot)
        req.slot, req.state = None, State.PAUSED
        self.paused[rid] = req

    def resume(self, rid: int) -> bool:
        slot = self.slots.claim()  # clean: near miss, back on the running request, or vacated
        req = self.paused.pop(rid, None)
        if req is None:
            if slot is not None:
                self.slots.vacate(slot)
            return False
        if slot is None:
            self.paused[rid] = req
            return False
        req.slot, req.state = slot, State.RUNNING
        self.running[rid] = req
        return True

    def abort_paused(self, rid: int) -> None:
        req = self.paused.pop(rid, None)
        if req is not None:
            self.budget.refund(req.reserved)
            req.reserved, req.state = 0, State.DONE

    def fan_out(self, parent: Request, n: int) -> list[Request]:
        """n samples of one prompt: all or nothing."""
        rows: list[int] = []
        for _ in range(n):
            row = self.slots.claim()  # clean: near miss, vacated below when short, else one per child
            if row is None:
                break
            rows.append(row)
        if len(rows) < n:
            for row in rows:
                self.slots.vacate(row)
            return []
        children = []
        for i, row in enumerate(rows):
            child = Request(parent.priority, parent.rid * 100 + i, parent.prompt_len, slot=row)
            child.state = State.RUNNING
            self.running[child.rid] = child
            children.append(child)
        return children

    def compact(self) -> int:
        """Moves the highest rows down so that the batch can be launched narrower."""
        moved = 0
        for req in sorted(self.running.values(), key=lambda r: -r.slot):
            lower = self.slots.claim()  # leak: a row that is no improvement breaks out and is not vacated
            if lower is None or lower > req.slot:
                break
            self.slots.vacate(req.slot)
            req.slot = lower
            moved += 1
        return moved


class BeamGroup:
    """Beams of one request share a group of rows."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self.rows: dict[int, int] = {}
        self.spare: int | None = None

    def open_beam(self, beam: int) -> bool:
        if beam in self.rows:
            return True
        row = self.slots.claim()  # clean: near miss, prune and close vacate it
        if row is None:
            return False
        self.rows[beam] = row
        return True

    def stage_spare(self, step: int) -> None:
        """A free row for the beam that may split off in this step."""
        self.spare = self.slots.claim()  # leak: the spare of the step before is overwritten, close ends one
        if self.spare is None:
            log.debug("step %d without a spare row", step)

    def prune(self, keep: set[int]) -> None:
        for beam in [b for b in self.rows if b not in keep]:
            self.slots.vacate(self.rows.pop(beam))

    def close(self) -> None:
        self.prune(set())
        if self.spare is not None:
            self.slots.vacate(self.spare)
            self.spare = None


class Warmup:
    def __init__(self, slots: SlotTable, budget: TokenBudget) -> None:
        self.slots, self.budget = slots, budget
        self.lane: int | None = None
        self.grant = 0

    def start(self, tokens: int) -> bool:
        self.lane = self.slots.claim()  # clean: stop vacates it
        if self.lane is None:
            return False
        if self.budget.reserve(tokens):  # leak: stop clears the grant before it would refund it
            self.grant = tokens
        return True

    def stop(self) -> None:
        self.grant = 0
        if self.lane is not None:
            self.slots.vacate(self.lane)
            self.lane = None
        if self.grant:
            self.budget.refund(self.grant)


def drain(sched: Scheduler, grace_s: float) -> int:
    end = time.monotonic() + grace_s
    while sched.running and time.monotonic() < end:
        sched.expire(time.monotonic())
        time.sleep(0.01)
    left = list(sched.running)
    for rid in left:
        sched.finish(rid)
    for rid in list(sched.paused):
        sched.abort_paused(rid)
    return len(left)
