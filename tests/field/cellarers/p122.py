"""Concurrent query permits with a quota for each tenant."""
import threading
from collections import Counter


class QuotaExceeded(Exception):
    pass


class TenantPermits:
    def __init__(self, quotas, default=2):
        self._quotas = quotas
        self._default = default
        self._in_use = Counter()
        self._lock = threading.Lock()

    def admit(self, tenant):
        with self._lock:
            if self._in_use[tenant] >= self._quotas.get(tenant, self._default):
                raise QuotaExceeded(tenant)
            self._in_use[tenant] += 1

    def dismiss(self, tenant):
        with self._lock:
            self._in_use[tenant] -= 1


class QueryService:
    def __init__(self, permits, engine):
        self.permits = permits
        self.engine = engine

    def run(self, tenant, sql):
        self.permits.admit(tenant)  # clean: dismissed in finally
        try:
            return self.engine.execute(sql)
        finally:
            self.permits.dismiss(tenant)

    def explain(self, tenant, sql):
        self.permits.admit(tenant)  # leak: a statement that is no select returns with the permit
        if not sql.lower().startswith("select"):
            return "not explainable"
        plan = self.engine.explain(sql)
        self.permits.dismiss(tenant)
        return plan

    def run_or_queue(self, tenant, sql, backlog):
        try:
            self.permits.admit(tenant)  # clean: queued where refused, dismissed otherwise
        except QuotaExceeded:
            backlog.append((tenant, sql))
            return None
        result = self.engine.execute(sql)
        self.permits.dismiss(tenant)
        return result

    def drain(self, backlog):
        while backlog:
            tenant, sql = backlog.pop(0)
            self.permits.admit(tenant)  # leak: the loop breaks on the first empty result, permit in hand
            if not self.engine.execute(sql):
                break
            self.permits.dismiss(tenant)
