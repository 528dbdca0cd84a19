"""Accelerator quota of a tenant, as counted grants."""
import itertools
import logging
import threading

log = logging.getLogger("gang.quota")


class QuotaExceeded(Exception):
    pass


class Grant:
    def __init__(self, ident, tenant, amount):
        self.ident = ident
        self.tenant = tenant
        self.amount = amount


class Quota:
    def __init__(self, limits):
        self._limits = dict(limits)
        self._used = {t: 0 for t in limits}
        self._ids = itertools.count()
        self._mu = threading.RLock()

    def ask(self, tenant, amount):
        with self._mu:
            if self._used[tenant] + amount > self._limits[tenant]:
                raise QuotaExceeded(f"{tenant} wants {amount}, has {self._limits[tenant] - self._used[tenant]}")
            self._used[tenant] += amount
            return Grant(next(self._ids), tenant, amount)

    def ask_softly(self, tenant, amount):
        """As much as is left, at least one; or None."""
        with self._mu:
            left = self._limits[tenant] - self._used[tenant]
            if left <= 0:
                return None
            return self.ask(tenant, min(left, amount))  # clean: returned as it is

    def refund(self, grant):
        with self._mu:
            self._used[grant.tenant] -= grant.amount
            grant.amount = 0

    def exchange(self, grant, amount):
        """A larger or smaller grant for an existing one."""
        with self._mu:
            new = self.ask(grant.tenant, amount)  # clean: near miss, it is the old one that is refunded and the new one returned
            self.refund(grant)
            return new
