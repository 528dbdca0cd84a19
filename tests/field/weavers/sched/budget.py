"""Token budget of a step and the row slots of the running batch."""
from __future__ import annotations

from typing import Optional


class Grant:
    __slots__ = ("tokens", "owner")

    def __init__(self, tokens: int, owner: str) -> None:
        self.tokens = tokens
        self.owner = owner


class TokenBudget:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def charge(self, tokens: int, owner: str) -> Optional[Grant]:
        """None when the step is full; otherwise `refund` the grant when the request leaves the step."""
        if self.used + tokens > self.limit:
            return None
        self.used += tokens
        return Grant(tokens, owner)

    def refund(self, grant: Grant) -> None:
        self.used -= grant.tokens
        grant.tokens = 0


class RowSlots:
    def __init__(self, rows: int) -> None:
        self._free = list(range(rows - 1, -1, -1))

    def claim(self) -> int:
        """-1 when the batch is full."""
        return self._free.pop() if self._free else -1

    def unclaim(self, row: int) -> None:
        self._free.append(row)
