"""Concurrent jobs with a quota a tenant, counted in two places."""
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class TenantQuota:
    total: int
    each: int
    running: Counter = field(default_factory=Counter)

    def admit(self, tenant):
        if self.running[tenant] >= self.each or sum(self.running.values()) >= self.total:
            return False
        self.running[tenant] += 1
        return True

    def dismiss(self, tenant):
        self.running[tenant] -= 1
        if not self.running[tenant]:
            del self.running[tenant]


class Dispatcher:
    def __init__(self, quota, cluster):
        self.quota = quota
        self.cluster = cluster
        self.owners = {}

    def start(self, tenant, job):
        if not self.quota.admit(tenant):  # clean: dismissed by on_exit, or at once
            return None
        pid = self.cluster.launch(job)
        if pid is None:
            self.quota.dismiss(tenant)
            return None
        self.owners[pid] = tenant
        return pid

    def on_exit(self, pid):
        self.quota.dismiss(self.owners.pop(pid))

    def run_inline(self, tenant, job):
        if not self.quota.admit(tenant):  # leak: not dismissed after a failed job
            return False
        if self.cluster.run(job) != 0:
            return False
        self.quota.dismiss(tenant)
        return True


def smoke(quota, cluster, tenants):
    passed = []
    for tenant in tenants:
        if not quota.admit(tenant):  # leak: the continue keeps the place
            continue
        if not cluster.ping(tenant):
            continue
        passed.append(tenant)
        quota.dismiss(tenant)
    return passed


def estimate(quota, cluster, tenant, job):
    if quota.admit(tenant):  # clean: dismissed in finally
        try:
            return cluster.estimate(job)
        finally:
            quota.dismiss(tenant)
    return None
