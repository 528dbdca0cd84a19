# take: P.charge(key, n)
# give: P.credit(key, n)
# gets: answer
# type: TenantLedger
from collections import Counter
from threading import RLock
from typing import Mapping, Optional


class TenantLedger:
    def __init__(self, default_limit: int, overrides: Optional[Mapping[str, int]] = None):
        self._limits = dict(overrides or {})
        self._default = default_limit
        self._usage: Counter = Counter()
        self._lock = RLock()

    def limit_for(self, tenant: str) -> int:
        return self._limits.get(tenant, self._default)

    def charge(self, tenant: str, amount: int) -> bool:
        with self._lock:
            if self._usage[tenant] + amount > self.limit_for(tenant):
                return False
            self._usage[tenant] += amount
            return True

    def credit(self, tenant: str, amount: int) -> None:
        with self._lock:
            left = self._usage[tenant] - amount
            if left > 0:
                self._usage[tenant] = left
            else:
                del self._usage[tenant]

    def snapshot(self) -> dict:
        with self._lock:
            return dict(self._usage)
