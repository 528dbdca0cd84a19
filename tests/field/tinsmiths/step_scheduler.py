"""Iteration-level scheduler: batch rows, logprob lanes, preemption."""
from __future__ import annotations

import enum
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    DONE = 3


class RowMap:
    """Bitmap of rows in the persistent batch."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.mask = 0

    def claim(self) -> int:
        for i in range(self.n):
            if not self.mask >> i & 1:
                self.mask |= 1 << i
                return i
        return -1

    def vacate(self, i: int) -> None:
        self.mask &= ~(1 << i)

    def claim_pair(self) -> Optional[Tuple[int, int]]:
        a = self.claim()  # leak: stays set when there is no second row
        if a < 0:
            return None
        b = self.claim()  # clean: returned with its partner
        if b < 0:
            return None
        return a, b

    def claim_group(self, k: int) -> List[int]:
        rows: List[int] = []
        for _ in range(k):
            r = self.claim()  # clean: the partial group is vacated before the empty answer
            if r < 0:
                for x in rows:
                    self.vacate(x)
                return []
            rows.append(r)
        return rows


@dataclass
class Request:
    rid: str
    tokens: List[int]
    max_new: int
    n: int = 1
    logprobs: bool = False
    prompt_logprobs: bool = False
    guided: bool = False
    cancelled: bool = False
    state: State = State.WAITING
    row: int = -1
    lane: int = -1
    mask_row: int = -1
    siblings: List[int] = field(default_factory=list)
    computed: int = 0

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


class StepScheduler:
    def __init__(self, rows: int, lanes: int, mask_rows: int, token_budget: int) -> None:
        self.rows = RowMap(rows)
        self.lanes = RowMap(lanes)
        self.mask_rows = RowMap(mask_rows)
        self.token_budget = token_budget
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}
        self.preempted: List[Request] = []
        self.beam_rows: Dict[str, Tuple[int, int]] = {}

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def _admit_new(self, budget: int) -> int:
        while self.waiting:
            row = self.rows.claim()  # clean: vacated when over budget, else held by the running request
            if row < 0:
                break
            req = self.waiting[0]
            if req.remaining > budget:
                self.rows.vacate(row)
                break
            self.waiting.popleft()
            req.row = row
            req.state = State.RUNNING
            self.running[req.rid] = req
            budget -= req.remaining
            self._attach_lanes(req)
        return budget

    def _admit_resumed(self, budget: int) -> int:
        for req in list(self.preempted):
            row = self.rows.claim()  # leak: continue on a cancelled request skips vacate
            if row < 0:
                break
            if req.cancelled:
                self.preempted.remove(req)
                self.finish(req)
                continue
            self.preempted.remove(req)
            req.row = row
            req.state = State.RUNNING
            self.running[req.rid] = req
            budget -= req.remaining
        return budget

    def _attach_lanes(self, req: Request) -> None:
        if req.logprobs or req.prompt_logprobs:
            req.lane = self.lanes.claim()  # leak: finish() vacates only when logprobs is set, not for prompt_logprobs
        if req.guided:
            req.mask_row = self.mask_rows.claim()  # clean: near miss, finish() has the same guard on guided

    def _attach_siblings(self, req: Request) -> bool:
        if req.n <= 1:
            return True
        req.siblings = self.rows.claim_group(req.n - 1)  # clean: finish() vacates req.siblings
        return bool(req.siblings)

    def start_beam(self, req: Request) -> bool:
        pair = self.rows.claim_pair()  # leak: lost when the request is already in beam_rows
        if pair is None:
            return False
        if req.rid in self.beam_rows:
            return True
        self.beam_rows[req.rid] = pair
        return True

    def end_beam(self, rid: str) -> None:
        pair = self.beam_rows.pop(rid, None)
        if pair is not None:
            for r in pair:
                self.rows.vacate(r)

    def finish(self, req: Request) -> None:
        if req.row >= 0:
            self.rows.vacate(req.row)
            req.row = -1
        if req.logprobs:
            if req.lane >= 0:
                self.lanes.vacate(req.lane)
            req.lane = -1
        if req.guided:
            if req.mask_row >= 0:
                self.mask_rows.vacate(req.mask_row)
            req.mask_row = -1
        for r in req.siblings:
            self.rows.vacate(r)
        req.siblings.clear()
        self.end_beam(req.rid)
        self.running.pop(req.rid, None)
        req.state = State.DONE

    def preempt_last(self) -> Optional[Request]:
        if not self.running:
            return None
        rid = next(reversed(self.running))
        req = self.running.pop(rid)
        self.rows.vacate(req.row)
        req.row = -1
        req.computed = 0
        req.state = State.PREEMPTED
        self.preempted.append(req)
        return req

    def move_to_front(self, req: Request) -> None:
        """Swap a request into the lowest row for the compact CUDA graph."""
        low = self.rows.claim()  # clean: near miss, the worse of the two rows is vacated either way
        if low < 0:
            return
        if low < req.row:
            low, req.row = req.row, low
        self.rows.vacate(low)

    def warm_rows(self, runner) -> int:
        ok = 0
        for _ in range(self.rows.n):
            row = self.rows.claim()  # leak: break after a failed warm-up leaves the row claimed
            if row < 0:
                break
            if not runner.dry_run(row):
                break
            self.rows.vacate(row)
            ok += 1
        return ok

    def probe_mask(self, runner) -> bool:
        row = self.mask_rows.claim()  # clean: vacated in finally
        if row < 0:
            return False
        try:
            return runner.apply_mask(row)
        finally:
            self.mask_rows.vacate(row)

    def wait_row(self, deadline: float) -> int:
        row = self.rows.claim()  # clean: near miss, the loop claims again only while this is -1
        while row < 0 and time.monotonic() < deadline:
            self.preempt_last()
            row = self.rows.claim()  # clean: returned to the caller
        return row

    def run_isolated(self, req: Request, runner, deadline: float):
        row = self.wait_row(deadline)  # leak: not vacated when the request was cancelled meanwhile
        if row < 0:
            raise TimeoutError(req.rid)
        if req.cancelled:
            return None
        out = runner.forward_one(row, req.tokens)
        self.rows.vacate(row)
        return out

    def step(self) -> List[Request]:
        left = self._admit_resumed(self.token_budget)
        self._admit_new(left)
        batch: List[Request] = []
        for req in list(self.running.values()):
            if req.cancelled:
                self.finish(req)
                continue
            if not req.siblings and not self._attach_siblings(req):
                continue
            batch.append(req)
        return batch
