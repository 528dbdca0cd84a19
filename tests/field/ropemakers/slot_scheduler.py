"""Continuous batching scheduler. Batch rows come from a bitmap, token budget from a counter."""
from __future__ import annotations

import enum
import logging
import time
from collections import deque
from typing import Deque, Dict, Iterator, List, Optional

logger = logging.getLogger("sched")


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    DONE = 3


class RowBitmap:
    """Rows of the persistent batch; bit set means the row is in use."""

    def __init__(self, rows: int):
        self.rows = rows
        self.bits = 0

    def claim_row(self) -> int:
        for r in range(self.rows):
            if not self.bits >> r & 1:
                self.bits |= 1 << r
                return r
        return -1

    def claim_span(self, n: int) -> Optional[range]:
        mask = (1 << n) - 1
        for r in range(self.rows - n + 1):
            if not self.bits >> r & mask:
                self.bits |= mask << r
                return range(r, r + n)
        return None

    def vacate(self, row: int) -> None:
        self.bits &= ~(1 << row)

    def vacate_span(self, span: range) -> None:
        for r in span:
            self.vacate(r)


class TokenBudget:
    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0

    def debit(self, n: int) -> bool:
        if self.used + n > self.limit:
            return False
        self.used += n
        return True

    def credit(self, n: int) -> None:
        self.used -= n


class Request:
    def __init__(self, rid: str, prompt_len: int, max_new: int, n: int = 1, priority: int = 0):
        self.rid = rid
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.n = n
        self.priority = priority
        self.row = -1
        self.span: Optional[range] = None
        self.tokens_held = 0
        self.state = State.WAITING
        self.deadline: Optional[float] = None

    @property
    def cost(self) -> int:
        return self.prompt_len + self.max_new


class Scheduler:
    def __init__(self, rows: int, budget: int, max_prompt: int):
        self.bitmap = RowBitmap(rows)
        self.budget = TokenBudget(budget)
        self.max_prompt = max_prompt
        self.waiting: Deque[Request] = deque()
        self.running: Dict[int, Request] = {}
        self.groups: List[Request] = []
        self.warm_row = -1

    # -- admission -----------------------------------------------------------

    def admit(self, req: Request) -> bool:
        row = self.bitmap.claim_row()  # leak: no rollback when the budget turns the request away
        if row < 0:
            return False
        if not self.budget.debit(req.cost):  # clean: remembered in tokens_held, retire() credits it
            return False
        req.row = row
        req.tokens_held = req.cost
        req.state = State.RUNNING
        self.running[row] = req
        return True

    def admit_checked(self, req: Request) -> bool:
        if not self.budget.debit(req.cost):  # clean: near miss, credited when no row is found
            return False
        row = self.bitmap.claim_row()  # clean: filed in self.running
        if row == -1:
            self.budget.credit(req.cost)
            return False
        req.row, req.tokens_held = row, req.cost
        req.state = State.RUNNING
        self.running[row] = req
        return True

    def admit_group(self, req: Request) -> bool:
        """Parallel sampling: n adjacent rows and one budget entry."""
        span = self.bitmap.claim_span(req.n)  # clean: vacated when the budget is short
        if span is None:
            return False
        cost = req.prompt_len + req.n * req.max_new
        if not self.budget.debit(cost):  # clean: held by the group, retire_group() credits it
            self.bitmap.vacate_span(span)
            return False
        req.span = span
        req.tokens_held = cost
        self.groups.append(req)
        return True

    def fill(self) -> int:
        admitted = 0
        skipped: List[Request] = []
        while self.waiting:
            req = self.waiting.popleft()
            if not self.budget.debit(req.cost):  # leak: a prompt that is too long is skipped with its tokens debited
                skipped.append(req)
                break
            if req.prompt_len > self.max_prompt:
                logger.warning("%s: prompt of %d tokens rejected", req.rid, req.prompt_len)
                continue
            row = self.bitmap.claim_row()  # clean: near miss, filed in self.running unless -1
            if row < 0:
                self.budget.credit(req.cost)
                skipped.append(req)
                break
            req.row, req.tokens_held = row, req.cost
            req.state = State.RUNNING
            self.running[row] = req
            admitted += 1
        self.waiting.extendleft(reversed(skipped))
        return admitted

    # -- retirement ----------------------------------------------------------

    def retire(self, req: Request) -> None:
        self.running.pop(req.row, None)
        self.bitmap.vacate(req.row)
        self.budget.credit(req.tokens_held)
        req.row, req.tokens_held = -1, 0
        req.state = State.DONE

    def retire_group(self, req: Request) -> None:
        self.groups.remove(req)
        if req.span is not None:
            self.bitmap.vacate_span(req.span)
            req.span = None
        self.budget.credit(req.tokens_held)
        req.tokens_held = 0

    def preempt(self, victim: Request) -> None:
        self.retire(victim)
        victim.state = State.PREEMPTED
        self.waiting.appendleft(victim)

    # -- chunked prefill -----------------------------------------------------

    def chunks(self, req: Request, size: int) -> Iterator[int]:
        """Yield chunk lengths; tokens of a chunk are on loan while the consumer works on it."""
        done = 0
        while done < req.prompt_len:
            n = min(size, req.prompt_len - done)
            if not self.budget.debit(n):  # clean: credited in the generator's finally
                return
            try:
                yield n
            finally:
                self.budget.credit(n)
            done += n

    def mixed_step(self, prefill: List[Request], step_tokens: int) -> List[Request]:
        chosen: List[Request] = []
        for req in prefill:
            if req.state is State.DONE:
                continue
            take = min(step_tokens, req.prompt_len)
            if not self.budget.debit(take):  # leak: expired requests go on without a credit
                break
            if req.deadline is not None and req.deadline < time.monotonic():
                req.state = State.DONE
                continue
            req.tokens_held += take
            chosen.append(req)
        return chosen

    def end_step(self, chosen: List[Request]) -> None:
        for req in chosen:
            self.budget.credit(req.tokens_held)
            req.tokens_held = 0

    # -- warm row ------------------------------------------------------------

    def keep_warm(self) -> None:
        """Hold one idle row so a high priority request never waits for it."""
        self.warm_row = self.bitmap.claim_row()  # leak: called again, the row held before is overwritten

    def take_warm(self, req: Request) -> bool:
        if self.warm_row < 0:
            return False
        row, self.warm_row = self.warm_row, -1
        if not self.budget.debit(req.cost):  # clean: recorded in tokens_held
            self.bitmap.vacate(row)
            return False
        req.row, req.tokens_held = row, req.cost
        self.running[row] = req
        return True

    def dry_run(self, reqs: List[Request]) -> int:
        rows = []
        for req in reqs:
            row = self.bitmap.claim_row()  # leak: the early return on a full bitmap keeps the rows of the dry run
            if row < 0:
                return len(rows)
            rows.append(row)
        for row in rows:
            self.bitmap.vacate(row)
        return len(reqs)
