"""Continuous batching scheduler."""
from __future__ import annotations

from collections import deque
from typing import Callable, Optional

from .budget import Grant, RowSlots, TokenBudget
from .request import Request


class Scheduler:
    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.rows = RowSlots(max_rows)
        self.budget = TokenBudget(max_tokens)
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.spec: dict[str, Grant] = {}
        self.rejected = 0

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def admit(self) -> int:
        n = 0
        while self.waiting:
            req = self.waiting[0]
            row = self.rows.claim()  # clean: near miss, given back when the budget refuses, else moved into the request
            if row < 0:
                break
            grant = self.budget.charge(req.prompt_len, req.rid)  # clean: moved into the request
            if grant is None:
                self.rows.unclaim(row)
                break
            self.waiting.popleft()
            req.row, req.grant = row, grant
            self.running[req.rid] = req
            n += 1
        return n

    def admit_priority(self, req: Request) -> bool:
        """Jump the queue, if there is room for it right now."""
        grant = self.budget.charge(req.prompt_len, req.rid)  # leak: a full batch returns False with the tokens charged
        if grant is None:
            return False
        row = self.rows.claim()  # clean: moved into the request
        if row < 0:
            return False
        req.grant, req.row = grant, row
        self.running[req.rid] = req
        return True

    def admit_batch(self, reqs: list[Request]) -> int:
        ok = 0
        for req in reqs:
            row = self.rows.claim()  # leak: an aborted request is skipped with its row claimed
            if row < 0:
                self.waiting.append(req)
                continue
            if req.aborted:
                self.rejected += 1
                continue
            req.row = row
            self.running[req.rid] = req
            ok += 1
        return ok

    def grow(self, req: Request, extra: int) -> bool:
        bigger = self.budget.charge(req.prompt_len + extra, req.rid)  # clean: near miss, the old grant is refunded before the overwrite
        if bigger is None:
            return False
        if req.grant is not None:
            self.budget.refund(req.grant)
        req.grant = bigger
        return True

    def extend(self, req: Request, extra: int) -> bool:
        more = self.budget.charge(extra, req.rid)  # leak: a further extension overwrites the entry of the one before it
        if more is None:
            return False
        if req.grant is None:
            req.grant = more
        else:
            self.spec[req.rid] = more
        return True

    def preempt_lowest(self) -> Optional[Request]:
        if not self.running:
            return None
        victim = min(self.running.values(), key=lambda r: r.priority)
        del self.running[victim.rid]
        victim.release(self.budget, self.rows)
        self.waiting.appendleft(victim)
        return victim

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            req.release(self.budget, self.rows)
        extra = self.spec.pop(rid, None)
        if extra is not None:
            self.budget.refund(extra)

    def can_fit(self, tokens: int) -> bool:
        return self.budget.charge(tokens, "probe") is not None  # leak: the probe's grant is never refunded

    def would_fit(self, tokens: int) -> bool:
        g = self.budget.charge(tokens, "probe")  # clean: refunded at once
        if g is not None:
            self.budget.refund(g)
        return g is not None

    def reserve_rows(self, n: int) -> Optional[list[int]]:
        """All or nothing."""
        got: list[int] = []
        for _ in range(n):
            row = self.rows.claim()  # clean: near miss, a partial list is unwound before None
            if row < 0:
                for r in got:
                    self.rows.unclaim(r)
                return None
            got.append(row)
        return got

    def beam(self, req: Request, width: int, start: Callable[[Request, list[int]], bool]) -> bool:
        rows = self.reserve_rows(width)  # leak: a start that declines returns False and the rows stay claimed
        if rows is None:
            return False
        if not start(req, rows):
            return False
        for r in rows:
            self.rows.unclaim(r)
        return True
