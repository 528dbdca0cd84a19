"""Continuous-batching scheduler: row slots, token budget and request life cycle."""
from __future__ import annotations

import enum
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("sched")


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    DONE = 3


class RowPool:
    def __init__(self, rows: int):
        self._free = list(range(rows - 1, -1, -1))

    def seat(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def unseat(self, row: int) -> None:
        self._free.append(row)


class TokenBudget:
    """A counter; charge() is all or nothing."""

    def __init__(self, total: int):
        self.left = total

    def charge(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


@dataclass
class Request:
    rid: str
    prompt_len: int
    max_new: int
    state: State = State.WAITING
    row: Optional[int] = None
    charged: int = 0
    deadline: float = 0.0
    children: list["Request"] = field(default_factory=list)
    on_finish: Optional[Callable[["Request"], None]] = None


class Scheduler:
    def __init__(self, rows: RowPool, budget: TokenBudget):
        self.rows = rows
        self.budget = budget
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.paused: list[Request] = []
        self.aborted: set[str] = set()

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def step_admit(self) -> int:
        n = 0
        while self.waiting:
            req = self.waiting[0]
            need = req.prompt_len + req.max_new
            if not self.budget.charge(need):  # clean: refunded when no row is free, else by finish()
                break
            row = self.rows.seat()  # clean: moved into the request, which finish() unseats
            if row is None:
                self.budget.refund(need)
                break
            self.waiting.popleft()
            req.row, req.charged, req.state = row, need, State.RUNNING
            self.running[req.rid] = req
            n += 1
        return n

    def admit_priority(self, req: Request) -> bool:
        need = req.prompt_len + req.max_new
        if not self.budget.charge(need):  # leak: no refund when no row is free
            return False
        row = self.rows.seat()  # clean: moved into the running request
        if row is None:
            self.waiting.appendleft(req)
            return False
        req.row, req.charged, req.state = row, need, State.RUNNING
        self.running[req.rid] = req
        return True

    def admit_group(self, parent: Request, width: int) -> bool:
        rows = []
        for _ in range(width):
            row = self.rows.seat()  # clean: near miss, rows are unseated again on failure
            if row is None:
                for r in rows:
                    self.rows.unseat(r)
                return False
            rows.append(row)
        for i, row in enumerate(rows):
            child = Request(f"{parent.rid}/{i}", 0, parent.max_new, State.RUNNING, row)
            parent.children.append(child)
            self.running[child.rid] = child
        return True

    def admit_aborted_aware(self) -> Optional[Request]:
        while self.waiting:
            row = self.rows.seat()  # leak: an aborted request is skipped with the row taken
            if row is None:
                return None
            req = self.waiting.popleft()
            if req.rid in self.aborted:
                self.aborted.discard(req.rid)
                continue
            req.row, req.state = row, State.RUNNING
            self.running[req.rid] = req
            return req
        return None

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        self._strip(req)
        req.state = State.DONE
        if req.on_finish:
            req.on_finish(req)

    def _strip(self, req: Request) -> None:
        if req.row is not None:
            self.rows.unseat(req.row)
            req.row = None
        if req.charged:
            self.budget.refund(req.charged)
            req.charged = 0

    def pause(self, rid: str) -> None:
        req = self.running.pop(rid)
        self._strip(req)
        req.state = State.PAUSED
        self.paused.append(req)

    def resume(self) -> int:
        kept, n = [], 0
        for req in self.paused:
            row = self.rows.seat()  # clean: near miss, moved into running or unseated before continue
            if row is None:
                kept.append(req)
                continue
            if not self.budget.charge(req.max_new):  # clean: recorded in req.charged, refunded by finish()
                self.rows.unseat(row)
                kept.append(req)
                continue
            req.row, req.charged, req.state = row, req.max_new, State.RUNNING
            self.running[req.rid] = req
            n += 1
        self.paused = kept
        return n

    def extend(self, rid: str, extra: int) -> bool:
        req = self.running.get(rid)
        if req is None or not self.budget.charge(extra):  # clean: added to req.charged
            return False
        req.charged += extra
        return True

    def extend_until(self, rid: str, extra: int, now: float) -> bool:
        req = self.running[rid]
        if not self.budget.charge(extra):  # leak: a request past its deadline is refused after the charge
            return False
        if req.deadline and now > req.deadline:
            log.info("%s is late by %.2fs", rid, now - req.deadline)
            return False
        req.charged += extra
        return True

    def migrate(self, rid: str, other: "Scheduler") -> bool:
        req = self.running[rid]
        row = other.rows.seat()  # clean: handed on in the request to the other scheduler
        if row is None:
            return False
        self.running.pop(rid)
        self._strip(req)
        req.row = row
        other.running[rid] = req
        return True

    def probe_rows(self, want: int) -> bool:
        got = [r for r in (self.rows.seat() for _ in range(want)) if r is not None]  # clean: all of got is unseated
        for r in got:
            self.rows.unseat(r)
        return len(got) == want

    def warm(self, run: Callable[[int], bool], tries: int) -> bool:
        for _ in range(tries):
            row = self.rows.seat()  # leak: a failed run takes another row in the next try
            if row is None:
                time.sleep(0.001)
                continue
            if run(row):
                self.rows.unseat(row)
                return True
        return False

    def restart(self, rid: str) -> bool:
        req = self.running.pop(rid)
        self._strip(req)
        row = self.rows.seat()  # leak: not unseated when the budget refuses the restarted request
        if row is None:
            self.waiting.append(req)
            return False
        if not self.budget.charge(req.prompt_len):  # clean: recorded in req.charged
            self.waiting.append(req)
            return False
        req.row, req.charged = row, req.prompt_len
        self.running[rid] = req
        return True
