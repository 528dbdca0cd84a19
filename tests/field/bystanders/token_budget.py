"""Token budgets per tenant; a grant has to be refunded when its request ends."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class Grant:
    tenant: str
    tokens: int


class TokenBudget:
    def __init__(self, limits: Dict[str, int]) -> None:
        self.left = dict(limits)

    def reserve_tokens(self, tenant: str, n: int) -> Optional[Grant]:
        if self.left.get(tenant, 0) < n:
            return None
        self.left[tenant] -= n
        return Grant(tenant, n)

    def refund_tokens(self, grant: Grant) -> None:
        self.left[grant.tenant] += grant.tokens


@dataclass
class Job:
    jid: str
    tenant: str
    prompt_len: int
    max_new: int
    priority: int = 0
    grant: Optional[Grant] = None
    children: List["Job"] = field(default_factory=list)

    @property
    def cost(self) -> int:
        return self.prompt_len + self.max_new


class BudgetQueue:
    def __init__(self, budget: TokenBudget, max_len: int = 8192) -> None:
        self.budget = budget
        self.max_len = max_len
        self.queue: List[Job] = []
        self.running: Dict[str, Job] = {}

    def push(self, job: Job) -> None:
        self.queue.append(job)
        self.queue.sort(key=lambda j: -j.priority)

    def start_next(self) -> Optional[Job]:
        for i, job in enumerate(self.queue):
            grant = self.budget.reserve_tokens(job.tenant, job.cost)  # clean: near miss, moved into the job that runs; None goes on
            if grant is None:
                continue
            job.grant = grant
            self.running[job.jid] = self.queue.pop(i)
            return job
        return None

    def start_batch(self, limit: int) -> List[Job]:
        started: List[Job] = []
        for job in list(self.queue):
            grant = self.budget.reserve_tokens(job.tenant, job.cost)  # leak: the break at the limit comes after the reservation
            if grant is None:
                continue
            if len(started) >= limit:
                break
            job.grant = grant
            self.queue.remove(job)
            self.running[job.jid] = job
            started.append(job)
        return started

    def start_family(self, job: Job) -> bool:
        grants: List[Grant] = []
        for member in [job, *job.children]:
            g = self.budget.reserve_tokens(member.tenant, member.cost)  # leak: rollback starts at the second grant
            if g is None:
                for x in grants[1:]:
                    self.budget.refund_tokens(x)
                return False
            grants.append(g)
        for member, g in zip([job, *job.children], grants):
            member.grant = g
            self.running[member.jid] = member
        return True

    def start_children(self, job: Job) -> int:
        grants: Dict[str, Grant] = {}
        for child in job.children:
            g = self.budget.reserve_tokens(child.tenant, child.cost)  # clean: near miss, the partial dict is refunded on shortage
            if g is None:
                while grants:
                    _, x = grants.popitem()
                    self.budget.refund_tokens(x)
                return 0
            grants[child.jid] = g
        for child in job.children:
            child.grant = grants[child.jid]
            self.running[child.jid] = child
        return len(grants)

    def try_immediately(self, job: Job) -> bool:
        grant = self.budget.reserve_tokens(job.tenant, job.cost)  # leak: a too long job is refused with the grant in hand
        if grant is None:
            return False
        if job.cost > self.max_len:
            logger.info("%s refused: %d tokens", job.jid, job.cost)
            return False
        job.grant = grant
        self.running[job.jid] = job
        return True

    def extend(self, jid: str, extra: int) -> bool:
        job = self.running[jid]
        more = self.budget.reserve_tokens(job.tenant, extra)  # clean: near miss, its tokens are added to the job's grant
        if more is None or job.grant is None:
            if more is not None:
                self.budget.refund_tokens(more)
            return False
        job.grant.tokens += more.tokens
        return True

    def regrant(self, jid: str, cost: int) -> bool:
        job = self.running[jid]
        new = self.budget.reserve_tokens(job.tenant, cost)  # clean: near miss, the grant replaced is refunded
        if new is None:
            return False
        old, job.grant = job.grant, new
        if old is not None:
            self.budget.refund_tokens(old)
        return True

    def can_run(self, job: Job) -> bool:
        return bool(self.budget.reserve_tokens(job.tenant, job.cost))  # leak: a question that keeps what it reserved

    def affordable(self, job: Job) -> bool:
        g = self.budget.reserve_tokens(job.tenant, job.cost)  # clean: refunded when granted
        if g is not None:
            self.budget.refund_tokens(g)
        return g is not None

    def finish(self, jid: str) -> None:
        job = self.running.pop(jid)
        if job.grant is not None:
            self.budget.refund_tokens(job.grant)
            job.grant = None
