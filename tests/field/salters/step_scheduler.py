"""Continuous batching: one step picks waiting requests under a token budget and a slot table."""
from __future__ import annotations

import enum
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

log = logging.getLogger(__name__)


class TokenBudget:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, tokens: int) -> bool:
        if self.used + tokens > self.capacity:
            return False
        self.used += tokens
        return True

    def give(self, tokens: int) -> None:
        self.used -= tokens


class SlotTable:
    """Rows of the static batch (sampling state, output ring, positions)."""

    def __init__(self, rows: int) -> None:
        self._vacant = list(range(rows))
        self._owner: Dict[int, str] = {}

    def claim(self, owner: str) -> Optional[int]:
        if not self._vacant:
            return None
        row = self._vacant.pop()
        self._owner[row] = owner
        return row

    def vacate(self, row: int) -> None:
        self._owner.pop(row, None)
        self._vacant.append(row)


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass
class Request:
    rid: str
    prompt_len: int
    deadline: float
    state: State = State.WAITING
    row: Optional[int] = None
    scratch_row: Optional[int] = None
    reserved: int = 0
    chunk: int = 0
    tokens: List[int] = field(default_factory=list)

    def expired(self) -> bool:
        return time.monotonic() > self.deadline


class StepScheduler:
    def __init__(self, budget: TokenBudget, slots: SlotTable, scratch: SlotTable, max_chunk: int = 512):
        self.budget = budget
        self.slots = slots
        self.scratch = scratch
        self.max_chunk = max_chunk
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def admit_waiting(self) -> List[Request]:
        admitted: List[Request] = []
        while self.waiting:
            req = self.waiting[0]
            row = self.slots.claim(req.rid)  # leak: the row is not vacated when the budget refuses
            if row is None:
                break
            if not self.budget.take(req.prompt_len):  # clean: kept as reserved, given in finish()
                log.info("no tokens for %s", req.rid)
                break
            self.waiting.popleft()
            req.row = row
            req.reserved = req.prompt_len
            req.state = State.RUNNING
            self.running.append(req)
            admitted.append(req)
        return admitted

    def admit_urgent(self, req: Request) -> bool:
        """Both a row and a scratch row; used by requests with guided decoding."""
        if (row := self.slots.claim(req.rid)) is None:  # clean: near miss, vacated on the second refusal
            return False
        extra = self.scratch.claim(req.rid)  # clean: finish() and preempt() vacate scratch_row
        if extra is None:
            self.slots.vacate(row)
            return False
        req.row, req.scratch_row = row, extra
        req.state = State.RUNNING
        self.running.append(req)
        return True

    def probe_capacity(self, lengths: List[int]) -> int:
        """How many prompts of these lengths would fit now."""
        fitting = 0
        for n in lengths:
            if not self.budget.take(n):  # leak: only the last fitting length is given back after the loop
                break
            fitting += 1
        if fitting:
            self.budget.give(lengths[fitting - 1])
        return fitting

    def preempt(self, req: Request) -> None:
        if req.row is not None:
            self.slots.vacate(req.row)
            req.row = None
        if req.scratch_row is not None:
            self.scratch.vacate(req.scratch_row)
            req.scratch_row = None
        if req.reserved:
            self.budget.give(req.reserved)
            req.reserved = 0
        req.state = State.PREEMPTED
        self.running.remove(req)
        self.waiting.appendleft(req)

    def resume(self, req: Request) -> bool:
        needs_scratch = req.chunk > 0
        row = self.slots.claim(req.rid)  # clean: the request has it, or it is vacated
        if row is None:
            return False
        scratch_row = None
        if needs_scratch:
            scratch_row = self.scratch.claim(req.rid)  # clean: near miss, same guard stores it
            if scratch_row is None:
                self.slots.vacate(row)
                return False
        req.row = row
        if needs_scratch:
            req.scratch_row = scratch_row
        req.state = State.RUNNING
        self.running.append(req)
        return True

    def extend_chunk(self, req: Request) -> int:
        """Next piece of a chunked prefill. Returns the number of tokens to run."""
        left = req.prompt_len - req.chunk
        step = min(left, self.max_chunk)
        if step <= 0:
            return 0
        if not self.budget.take(step):  # leak: an expired request returns 0 with the tokens still taken
            return 0
        if req.expired():
            log.info("%s expired in prefill", req.rid)
            return 0
        req.chunk += step
        req.reserved += step
        return step

    def extend_decode(self, req: Request, draft: int) -> bool:
        if not self.budget.take(draft + 1):  # clean: near miss, the expired path gives them back
            return False
        if req.expired():
            self.budget.give(draft + 1)
            return False
        req.reserved += draft + 1
        return True

    def borrow_scratch(self, reqs: List[Request]) -> Dict[str, int]:
        rows: Dict[str, int] = {}
        for req in reqs:
            row = self.scratch.claim(req.rid)  # leak: rows of requests that have finished are skipped
            if row is None:
                break
            if req.state is State.FINISHED:
                continue
            rows[req.rid] = row
        return rows

    def run_guided(self, reqs: List[Request]) -> int:
        rows = self.borrow_scratch(reqs)  # clean: every row of the mapping is vacated after use
        done = 0
        for rid, row in rows.items():
            log.info("guided %s on %d", rid, row)
            done += 1
        for row in rows.values():
            self.scratch.vacate(row)
        return done

    def count_guided(self, reqs: List[Request]) -> int:
        rows = self.borrow_scratch(reqs)  # leak: only counted, the rows are dropped
        return len(rows)

    def finish(self, req: Request) -> None:
        req.state = State.FINISHED
        if req.row is not None:
            self.slots.vacate(req.row)
            req.row = None
        if req.scratch_row is not None:
            self.scratch.vacate(req.scratch_row)
            req.scratch_row = None
        self.budget.give(req.reserved)
        req.reserved = 0
        if req in self.running:
            self.running.remove(req)
