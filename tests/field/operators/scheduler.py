"""Continuous batching scheduler: token budget, batch rows and preemption."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass
class Request:
    rid: str
    prompt_len: int
    max_new_tokens: int
    priority: int = 0
    computed: int = 0
    row: int | None = None
    reserved: int = 0
    finished: bool = False
    aborted: bool = False


class RowAllocator:
    """Rows of the persistent batch tensors."""

    def __init__(self, max_rows: int) -> None:
        self._available = set(range(max_rows))

    def alloc_row(self) -> int | None:
        if not self._available:
            return None
        return self._available.pop()  # clean: to the caller

    def free_row(self, row: int) -> None:
        self._available.add(row)


class TokenQuota:
    """KV tokens that may be promised to requests."""

    def __init__(self, total: int) -> None:
        self.remaining = total

    def charge(self, n: int) -> int:
        """Take up to n tokens; returns the granted amount."""
        granted = min(n, self.remaining)
        self.remaining -= granted  # clean: the granted amount goes to the caller
        return granted

    def uncharge(self, n: int) -> None:
        self.remaining += n


class Scheduler:
    """Decides which requests run in the next step."""

    def __init__(self, rows: RowAllocator, quota: TokenQuota, chunk: int = 512) -> None:
        self.rows = rows
        self.quota = quota
        self.chunk = chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def schedule_prefill(self) -> list[Request]:
        """Move waiting requests into the batch while rows and tokens last."""
        batch: list[Request] = []
        while self.waiting:
            req = self.waiting[0]
            row = self.rows.alloc_row()  # leak: the break for a short grant gives back the tokens but not the row
            if row is None:
                break
            need = req.prompt_len + req.max_new_tokens
            granted = self.quota.charge(need)  # clean: near miss, a short grant is uncharged, a full one is the request's until _release()
            if granted < need:
                self.quota.uncharge(granted)
                break
            self.waiting.popleft()
            req.row, req.reserved = row, granted
            self.running.append(req)
            batch.append(req)
        return batch

    def schedule_urgent(self, req: Request) -> bool:
        """Put a high-priority request into the batch right away."""
        if req.row is not None:
            return True
        row = self.rows.alloc_row()  # clean: near miss, both failures below free it
        if row is None:
            return False
        need = req.prompt_len + req.max_new_tokens
        granted = self.quota.charge(need)  # leak: a grant that stays short after preemption is not uncharged
        while granted < need:
            if not self._preempt_one(req.priority):
                self.rows.free_row(row)
                return False
            granted += self.quota.charge(need - granted)  # leak: added to the grant that the failed preemption drops
        if req.aborted:
            self.quota.uncharge(granted)
            self.rows.free_row(row)
            return False
        req.row, req.reserved = row, granted
        self.running.append(req)
        return True

    def _preempt_one(self, priority: int) -> bool:
        victims = [r for r in self.running if r.priority < priority]
        if not victims:
            return False
        victim = min(victims, key=lambda r: (r.priority, -r.computed))
        self.running.remove(victim)
        self._release(victim)
        victim.computed = 0
        self.waiting.appendleft(victim)
        return True

    def _release(self, req: Request) -> None:
        if req.row is not None:
            self.rows.free_row(req.row)
            req.row = None
        self.quota.uncharge(req.reserved)
        req.reserved = 0

    def grow(self, req: Request, extra: int) -> bool:
        """Raise a running request's token reservation."""
        granted = self.quota.charge(extra)  # clean: near miss, also a partial grant is kept in the request's reservation
        req.reserved += granted
        return granted == extra

    def shrink(self, req: Request) -> int:
        """Give back the part of the reservation that can no longer be used."""
        spare = req.reserved - req.prompt_len - req.max_new_tokens
        if spare > 0:
            self.quota.uncharge(spare)
            req.reserved -= spare
        return max(spare, 0)

    def step_done(self) -> list[Request]:
        """Remove finished requests from the batch."""
        done = [r for r in self.running if r.finished or r.aborted]
        self.running = [r for r in self.running if not (r.finished or r.aborted)]
        for req in done:
            self._release(req)
        return done

    def reassign_row(self, req: Request) -> int:
        """Give a request a lower row so that the batch stays dense."""
        row = self.rows.alloc_row()  # leak: a row that is not lower is dropped
        if row is None:
            return req.row
        if row < req.row:
            self.rows.free_row(req.row)
            req.row = row
        return req.row

    def fits(self, req: Request) -> bool:
        """Whether the request could be admitted now; takes nothing."""
        need = req.prompt_len + req.max_new_tokens
        granted = self.quota.charge(need)  # clean: near miss, the whole grant is uncharged before either answer
        self.quota.uncharge(granted)
        return granted == need

    def dummy_batch(self, size: int) -> list[int]:
        """Rows for a dummy run at start-up."""
        rows: list[int] = []
        for _ in range(size):
            row = self.rows.alloc_row()  # clean: returned in the list
            if row is None:
                break
            rows.append(row)
        return rows

    def profile(self, size: int, run) -> float:
        """Time a dummy batch."""
        rows = self.dummy_batch(size)  # leak: too few rows return without freeing those that were there
        if len(rows) < size:
            logger.warning("only %d of %d rows", len(rows), size)
            return 0.0
        elapsed = run(rows)
        for row in rows:
            self.rows.free_row(row)
        return elapsed
