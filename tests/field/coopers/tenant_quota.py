"""Token quotas and admission for tenants. Everything here is called from gateway threads."""
from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from dataclasses import dataclass, field

LOG = logging.getLogger("quota")


@dataclass(frozen=True)
class Ticket:
    number: int
    tenant: str
    tokens: int
    issued_at: float = field(compare=False, default=0.0)


class TokenLedger:
    """Reserved tokens count against the tenant until the ticket is redeemed."""

    def __init__(self, budgets: dict[str, int]) -> None:
        self._budgets = dict(budgets)
        self._reserved: dict[str, int] = {t: 0 for t in budgets}
        self._numbers = itertools.count(1)
        self._mutex = threading.Lock()

    def issue(self, tenant: str, tokens: int) -> Ticket | None:
        with self._mutex:
            if tenant not in self._budgets:
                return None
            if self._reserved[tenant] + tokens > self._budgets[tenant]:
                return None
            self._reserved[tenant] += tokens
            return Ticket(next(self._numbers), tenant, tokens, time.monotonic())

    def redeem(self, ticket: Ticket, used: int = 0) -> None:
        with self._mutex:
            self._reserved[ticket.tenant] -= ticket.tokens
            self._budgets[ticket.tenant] -= used

    def top_up(self, tenant: str, tokens: int) -> None:
        with self._mutex:
            self._budgets[tenant] = self._budgets.get(tenant, 0) + tokens
            self._reserved.setdefault(tenant, 0)


class TenantLocks:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: set[str] = set()

    def try_lock(self, tenant: str) -> bool:
        with self._guard:
            if tenant in self._held:
                return False
            self._held.add(tenant)
            return True

    def unlock(self, tenant: str) -> None:
        with self._guard:
            self._held.discard(tenant)


@dataclass
class Job:
    job_id: str
    tenant: str
    tokens: int


class AdmissionController:
    def __init__(self, ledger: TokenLedger, locks: TenantLocks, depth: int = 256, ttl: float = 60.0) -> None:
        self.ledger = ledger
        self.locks = locks
        self.ttl = ttl
        self.inbox: queue.Queue[tuple[Job, Ticket]] = queue.Queue(depth)
        self.live: dict[str, Ticket] = {}
        self.batch: dict[str, Ticket] = {}

    def submit(self, job: Job) -> bool:
        ticket = self.ledger.issue(job.tenant, job.tokens)  # leak: a full inbox is reported as refusal and the ticket stays reserved
        if ticket is None:
            return False
        try:
            self.inbox.put_nowait((job, ticket))
        except queue.Full:
            LOG.info("inbox full, refusing %s", job.job_id)
            return False
        return True

    def submit_or_wait(self, job: Job, timeout: float) -> bool:
        ticket = self.ledger.issue(job.tenant, job.tokens)  # clean: near miss, the same refusal but redeemed, else the inbox owns it
        if ticket is None:
            return False
        try:
            self.inbox.put((job, ticket), timeout=timeout)
        except queue.Full:
            self.ledger.redeem(ticket)
            return False
        return True

    def next_job(self) -> Job | None:
        try:
            job, ticket = self.inbox.get_nowait()
        except queue.Empty:
            return None
        stale = self.live.pop(job.job_id, None)
        if stale is not None:
            self.ledger.redeem(stale)
        self.live[job.job_id] = ticket
        return job

    def complete(self, job_id: str, used: int) -> None:
        ticket = self.live.pop(job_id, None)
        if ticket is None:
            ticket = self.batch.pop(job_id, None)
        if ticket is not None:
            self.ledger.redeem(ticket, used)

    def add_batch_job(self, job: Job) -> bool:
        if job.job_id in self.batch:
            return False
        ticket = self.ledger.issue(job.tenant, job.tokens)  # leak: expire() deletes overdue batch entries without redeeming them
        if ticket is None:
            return False
        self.batch[job.job_id] = ticket
        return True

    def expire(self, now: float) -> list[str]:
        gone = [j for j, t in self.live.items() if now - t.issued_at > self.ttl]
        for job_id in gone:
            self.ledger.redeem(self.live.pop(job_id))
        overdue = [j for j, t in self.batch.items() if now - t.issued_at > 100 * self.ttl]
        for job_id in overdue:
            del self.batch[job_id]
        return gone + overdue

    def extend(self, job_id: str, tokens: int) -> bool:
        old = self.live.get(job_id)
        if old is None:
            return False
        more = self.ledger.issue(old.tenant, old.tokens + tokens)  # clean: near miss, the old ticket is redeemed before it is replaced
        if more is None:
            return False
        self.ledger.redeem(old)
        self.live[job_id] = more
        return True

    def would_admit(self, job: Job) -> bool:
        ticket = self.ledger.issue(job.tenant, job.tokens)  # clean: near miss, a trial that is redeemed unused
        if ticket is None:
            return False
        self.ledger.redeem(ticket)
        return True

    def set_budget(self, tenant: str, delta: int) -> bool:
        if not self.locks.try_lock(tenant):  # leak: a zero delta returns with the tenant still locked
            return False
        if delta == 0:
            return True
        self.ledger.top_up(tenant, delta)
        self.locks.unlock(tenant)
        return True

    def drain_tenant(self, tenant: str, force: bool = False) -> int:
        locked = self.locks.try_lock(tenant)  # clean: near miss, unlocked under the same flag that tells it was locked
        if not locked and not force:
            return 0
        n = 0
        for job_id in [j for j, t in self.live.items() if t.tenant == tenant]:
            self.complete(job_id, 0)
            n += 1
        if locked:
            self.locks.unlock(tenant)
        return n

    def move_budget(self, src: str, dst: str, tokens: int) -> bool:
        if not self.locks.try_lock(src):  # leak: when dst is busy the function returns with src still locked
            return False
        if not self.locks.try_lock(dst):  # clean: unlocked in the finally
            return False
        try:
            self.ledger.top_up(src, -tokens)
            self.ledger.top_up(dst, tokens)
        finally:
            self.locks.unlock(dst)
            self.locks.unlock(src)
        return True
