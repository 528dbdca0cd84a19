"""Budgets: a number of units which requests take and pay back."""
from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Permit:
    budget: "Budget"
    units: int

    def refund(self) -> None:
        self.budget.put_back(self.units)


class Budget:
    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._used = 0
        self._mu = threading.Lock()

    def take(self, units: int = 1) -> Permit | None:
        with self._mu:
            if self._used + units > self.limit:
                return None
            self._used += units
        return Permit(self, units)

    def put_back(self, units: int) -> None:
        with self._mu:
            self._used -= units

    @property
    def load(self) -> float:
        return self._used / self.limit if self.limit else 1.0


class BudgetBook:
    """Budgets by tenant, made on demand."""

    def __init__(self, default_limit: int) -> None:
        self.default_limit = default_limit
        self._by_tenant: dict[str, Budget] = {}

    def of(self, tenant: str) -> Budget:
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = Budget(tenant, self.default_limit)
        return self._by_tenant[tenant]

    def would_admit(self, tenant: str, units: int) -> bool:
        """Used by the admin page: tells whether a request would come through now."""
        permit = self.of(tenant).take(units)  # leak: a successful probe keeps its units
        return permit is not None

    def has_room(self, tenant: str) -> bool:
        permit = self.of(tenant).take()  # clean: the probe is refunded
        if permit is None:
            return False
        permit.refund()
        return True
