"""Continuous batching: request slots, token budget and preemption."""
from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Deque, Dict, List, Optional, Tuple

log = logging.getLogger("scheduler")


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass
class Request:
    rid: str
    prompt: List[int]
    priority: int = 0
    status: Status = Status.WAITING
    row: int = -1
    mamba: Optional[int] = None
    needs_state: bool = False
    out: List[int] = field(default_factory=list)


class RowPool:
    """Rows of the request-to-token table, lowest first."""

    def __init__(self, n: int) -> None:
        self.heap = list(range(n))

    def take(self) -> int:
        return heapq.heappop(self.heap) if self.heap else -1  # clean: returned to the caller

    def give(self, row: int) -> None:
        heapq.heappush(self.heap, row)


class StatePool:
    """Recurrent states. A snapshot is held until it is dropped."""

    def __init__(self, n: int, rows: RowPool) -> None:
        self.free: Deque[int] = deque(range(n))
        self.rows = rows

    def open(self) -> Optional[int]:
        if not self.free:
            return None
        return self.free.popleft()  # clean: returned to the caller

    def open_with_row(self) -> Optional[Tuple[int, int]]:
        row = self.rows.take()  # leak: without a free state it returns None and the row is lost
        if row < 0:
            return None
        st = self.open()  # clean: returned in the pair
        if st is None:
            return None
        return row, st

    def shut(self, st: int) -> None:
        self.free.append(st)


class Tokens:
    """Token budget of one step, a plain counter."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total

    def draw(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def undraw(self, n: int) -> None:
        self.left += n


class Scheduler:
    def __init__(self, rows: int, states: int, budget: int) -> None:
        self.rows = RowPool(rows)
        self.states = StatePool(states, self.rows)
        self.tokens = Tokens(budget)
        self.waiting: List[Tuple[int, int, Request]] = []
        self.running: Dict[str, Request] = {}
        self.seq = itertools.count()

    def add(self, req: Request) -> None:
        heapq.heappush(self.waiting, (-req.priority, next(self.seq), req))

    def _place(self, req: Request) -> bool:
        if req.rid in self.running:
            return False
        row = self.rows.take()  # clean: given when there is no state, else kept in req.row for finish()
        if row < 0:
            return False
        if req.needs_state:
            st = self.states.open()  # clean: near miss, finish() shuts it on the same needs_state
            if st is None:
                self.rows.give(row)
                return False
            req.mamba = st
        req.row = row
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    def schedule(self) -> List[Request]:
        batch: List[Request] = []
        skipped = []
        while self.waiting:
            item = heapq.heappop(self.waiting)
            req = item[2]
            if not self.tokens.draw(len(req.prompt)):  # clean: undrawn when not placed, else by end_step()
                skipped.append(item)
                continue
            if not self._place(req):
                self.tokens.undraw(len(req.prompt))
                skipped.append(item)
                break
            batch.append(req)
        for item in skipped:
            heapq.heappush(self.waiting, item)
        return batch

    def end_step(self, batch: List[Request]) -> None:
        for req in batch:
            self.tokens.undraw(len(req.prompt))

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        req.status = Status.FINISHED
        self.rows.give(req.row)
        req.row = -1
        if req.needs_state:
            self.states.shut(req.mamba)
            req.mamba = None

    def place_restored(self, req: Request, ckpt) -> bool:
        """Resume from a checkpoint that was written by another replica."""
        if req.needs_state:
            return False
        row = self.rows.take()  # leak: a stale checkpoint returns with the row taken
        if row < 0 or req.rid in self.running:
            return False
        if ckpt.version != 3:
            return False
        req.row = row
        req.out = list(ckpt.tokens)
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    def place_hybrid(self, req: Request) -> bool:
        pair = self.states.open_with_row()  # leak: a duplicate request returns and neither half is given back
        if pair is None:
            return False
        row, st = pair
        if req.rid in self.running:
            log.warning("%s is already running", req.rid)
            return False
        req.needs_state = True
        req.row, req.mamba = row, st
        self.running[req.rid] = req
        return True

    def dummy_run(self, forward, n: int) -> int:
        rows = []
        for _ in range(n):
            r = self.rows.take()  # clean: near miss, break keeps the earlier rows, given in the finally
            if r < 0:
                break
            rows.append(r)
        try:
            forward(rows)
        finally:
            for r in rows:
                self.rows.give(r)
        return len(rows)

    def snapshot(self, req: Request, copy_state) -> Optional[int]:
        if req.mamba is None:
            return None
        snap = self.states.open()  # leak: a failed copy returns None and the snapshot state is lost
        if snap is None:
            return None
        if not copy_state(req.mamba, snap):
            return None
        return snap

    def rollback(self, req: Request, snap: int) -> None:
        """Makes a snapshot the request's state."""
        old, req.mamba = req.mamba, snap
        if old is not None:
            self.states.shut(old)

    def retry_with_snapshot(self, req: Request, copy_state, step) -> bool:
        snap = self.snapshot(req, copy_state)  # clean: rolled back into the request, or shut
        if snap is None:
            return step(req)
        if step(req):
            self.states.shut(snap)
            return True
        self.rollback(req, snap)
        return False

    def score_prompts(self, prompts: List[List[int]], forward) -> List[Optional[float]]:
        scores: List[Optional[float]] = []
        for p in prompts:
            row = self.rows.take()  # leak: prompts of one token go on to the next with the row taken
            if row < 0:
                scores.append(None)
                continue
            if len(p) < 2:
                scores.append(0.0)
                continue
            scores.append(forward(row, p))
            self.rows.give(row)
        return scores

    def encode_prompts(self, prompts: List[List[int]], forward) -> List[object]:
        outs = []
        row = self.rows.take()  # clean: near miss, one row for the whole loop and given after it
        if row < 0:
            return outs
        for p in prompts:
            if not p:
                continue
            outs.append(forward(row, p))
        self.rows.give(row)
        return outs

    def chunk_prefill(self, req: Request, chunk: int, forward) -> bool:
        if not self.tokens.draw(chunk):  # leak: a request that is not running returns with the tokens drawn
            return False
        if req.status is not Status.RUNNING:
            return False
        forward(req.row, req.prompt[:chunk])
        self.tokens.undraw(chunk)
        return True

    def preempt_lowest(self) -> Optional[Request]:
        if not self.running:
            return None
        victim = min(self.running.values(), key=lambda r: r.priority)
        self.finish(victim.rid)
        victim.status = Status.PREEMPTED
        self.add(victim)
        return victim
