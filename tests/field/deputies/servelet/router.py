from __future__ import annotations

from .quota import Grant, Quota
from .replica import Job, Replica


class Router:
    def __init__(self, replicas: list[Replica], quota: Quota) -> None:
        self.replicas = replicas
        self.quota = quota
        self.grants: dict[str, Grant] = {}
        self.where: dict[str, Replica] = {}
        self.trial: dict[str, Grant] = {}

    def _place(self, job: Job) -> Replica | None:
        for r in self.replicas:
            if r.add(job):  # clean: near miss, the first replica that takes the job ends the search, its slot ends with the job
                return r
        return None

    def submit(self, tenant: str, job: Job) -> bool:
        if job.rid in self.where:
            return False
        grant = self.quota.charge(tenant, len(job.prompt) + job.limit)  # clean: near miss, refunded when no replica has room, else kept in grants till done() or cancel()
        if grant is None:
            return False
        replica = self._place(job)  # clean: the job stays with the replica, which ends it
        if replica is None:
            self.quota.refund(grant)
            return False
        self.grants[job.rid] = grant
        self.where[job.rid] = replica
        return True

    def submit_trial(self, tenant: str, job: Job) -> bool:
        if job.rid in self.where:
            return False
        grant = self.quota.charge(tenant, job.limit)  # leak: goes into trial, which done() and cancel() never look into
        if grant is None:
            return False
        self.trial[job.rid] = grant
        replica = self._place(job)  # clean: the job stays with the replica, which ends it
        if replica is None:
            self.quota.refund(self.trial.pop(job.rid))
            return False
        self.where[job.rid] = replica
        return True

    def extend(self, rid: str, tenant: str, more: int) -> bool:
        extra = self.quota.charge(tenant, more)  # leak: the grant kept in grants is overwritten by the extra one, its tokens unrefunded
        if extra is None:
            return False
        self.grants[rid] = extra
        return True

    def merge_extend(self, rid: str, tenant: str, more: int) -> bool:
        grant = self.grants.get(rid)
        if grant is None or grant.tenant != tenant:
            return False
        extra = self.quota.charge(tenant, more)  # clean: near miss, its tokens are added to the kept grant
        if extra is None:
            return False
        grant.tokens += extra.tokens
        return True

    def done(self, rid: str) -> None:
        self.where.pop(rid, None)
        grant = self.grants.pop(rid, None)
        if grant is not None:
            self.quota.refund(grant)

    def cancel(self, rid: str) -> None:
        replica = self.where.get(rid)
        if replica is not None:
            replica.cancel(rid)
        self.done(rid)
