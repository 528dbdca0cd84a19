"""Per-tenant token quota and sequence slots."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Grant:
    tenant: str
    tokens: int


class Quota:
    def __init__(self, limits: dict[str, int]) -> None:
        self._left = dict(limits)

    def charge(self, tenant: str, tokens: int) -> Grant | None:
        if self._left.get(tenant, 0) < tokens:
            return None
        self._left[tenant] -= tokens
        return Grant(tenant, tokens)

    def refund(self, grant: Grant) -> None:
        self._left[grant.tenant] += grant.tokens
        grant.tokens = 0


class SlotMap:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def claim(self) -> int:
        return self._free.pop() if self._free else -1

    def unclaim(self, slot: int) -> None:
        self._free.append(slot)
