"""Token quotas with charges that are settled once the real usage is known."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Charge:
    tenant: str
    tokens: int
    open: bool = True


class QuotaBook:
    def __init__(self, limits: dict[str, int]) -> None:
        self._left = dict(limits)
        self.pending = 0

    def charge(self, tenant: str, tokens: int) -> Charge | None:
        if self._left.get(tenant, 0) < tokens:
            return None
        self._left[tenant] -= tokens
        self.pending += 1
        return Charge(tenant, tokens)

    def settle(self, charge: Charge, used: int) -> None:
        if not charge.open:
            return
        charge.open = False
        self.pending -= 1
        self._left[charge.tenant] += charge.tokens - used

    def void(self, charge: Charge) -> None:
        self.settle(charge, 0)
