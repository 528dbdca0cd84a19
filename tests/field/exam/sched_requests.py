"""Request table of a continuous-batching scheduler with row slots."""
from __future__ import annotations

import itertools
import logging
import typing as t
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

logger = logging.getLogger("sched")


class State(IntEnum):
    WAITING = 0
    RUNNING = 1
    DONE = 2
    ABORTED = 3


@dataclass
class Request:
    rid: str
    prompt: t.List[int]
    max_new: int
    row: int = -1
    state: State = State.WAITING
    out: t.List[int] = field(default_factory=list)


class RowTable:
    """Rows of the persistent batch."""

    def __init__(self, rows: int):
        self._free = set(range(rows))

    def reserve(self) -> int | None:
        return self._free.pop() if self._free else None  # clean: goes to the caller

    def unreserve(self, row: int) -> None:
        self._free.add(row)

    def __len__(self):
        return len(self._free)


class Scheduler:
    def __init__(self, rows: RowTable, budget: int):
        self.rows = rows
        self.budget = budget
        self.waiting: t.Deque[Request] = deque()
        self.running: t.Dict[str, Request] = {}
        self.spare: t.List[int] = []
        self.serial = itertools.count()

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def schedule(self) -> t.List[Request]:
        """Admit in FCFS order."""
        budget = self.budget
        admitted = []
        while self.waiting:
            req = self.waiting[0]
            row = self.rows.reserve()  # leak: the budget break drops the row
            if row is None:
                break
            if len(req.prompt) > budget:
                break
            self.waiting.popleft()
            req.row = row
            req.state = State.RUNNING
            budget -= len(req.prompt)
            self.running[req.rid] = req
            admitted.append(req)
        return admitted

    def schedule_strict(self) -> t.List[Request]:
        budget = self.budget
        admitted = []
        while self.waiting:
            req = self.waiting[0]
            if len(req.prompt) > budget:
                break
            row = self.rows.reserve()  # clean: moved into the request, finish gives it back
            if row is None:
                break
            self.waiting.popleft()
            req.row, req.state = row, State.RUNNING
            budget -= len(req.prompt)
            self.running[req.rid] = req
            admitted.append(req)
        return admitted

    def schedule_with_rollback(self) -> Request | None:
        row = self.rows.reserve()  # clean: near miss, given back when no request wants it
        if row is None:
            return None
        req = next((r for r in self.waiting if len(r.prompt) <= self.budget), None)
        if req is None:
            self.rows.unreserve(row)
            return None
        self.waiting.remove(req)
        req.row = row
        self.running[req.rid] = req
        return req

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid)
        self.rows.unreserve(req.row)
        req.row = -1
        req.state = State.DONE

    def abort(self, rids: t.Iterable[str]) -> None:
        for rid in rids:
            if rid in self.running:
                self.finish(rid)

    def preempt_last(self) -> None:
        if not self.running:
            return
        rid, req = self.running.popitem()
        self.rows.unreserve(req.row)
        req.row = -1
        self.waiting.appendleft(req)

    def hold_spare(self, n: int) -> None:
        for _ in range(n):
            row = self.rows.reserve()  # leak: drop_spare clears the list after giving back a slice of it
            if row is not None:
                self.spare.append(row)

    def drop_spare(self) -> None:
        for row in self.spare[1:]:
            self.rows.unreserve(row)
        self.spare.clear()

    def dummy_run(self, steps: int) -> int:
        row = self.rows.reserve()  # leak: steps == 0 returns with the row
        if row is None:
            return -1
        if steps == 0:
            return 0
        total = 0
        for s in range(steps):
            total += row * s
        self.rows.unreserve(row)
        return total

    def warmup(self, n: int) -> None:
        rows = []
        while len(rows) < n:
            r = self.rows.reserve()  # clean: near miss, the break leaves the loop with every row in the list
            if r is None:
                break
            rows.append(r)
        while rows:
            self.rows.unreserve(rows.pop())

    def capacity(self) -> int:
        n = 0
        while self.rows.reserve() is not None:  # leak: counting takes every row and none comes back
            n += 1
        return n

    def fork(self, parent: Request, n: int) -> t.List[Request]:
        kids = []
        for i in range(n):
            row = self.rows.reserve()  # leak: when rows run out the earlier children are dropped by the raise
            if row is None:
                raise RuntimeError("no row for fork")
            kids.append(Request(f"{parent.rid}-{i}", list(parent.prompt), parent.max_new, row=row))
        for k in kids:
            self.running[k.rid] = k
        return kids

    def fork_one(self, parent: Request) -> Request:
        row = self.rows.reserve()  # clean: near miss, None when raising
        if row is None:
            raise RuntimeError("no row for fork")
        kid = Request(f"{parent.rid}-f{next(self.serial)}", list(parent.prompt), parent.max_new, row=row)
        self.running[kid.rid] = kid
        return kid
