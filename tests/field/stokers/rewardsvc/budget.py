from __future__ import annotations

from typing import Dict


class TokenBudget:
    """Judge tokens that open requests of each tenant may still spend."""

    def __init__(self, total: int) -> None:
        self.left = total
        self._spent: Dict[str, int] = {}

    def earmark(self, tenant: str, tokens: int) -> bool:
        if tokens > self.left:
            return False
        self.left -= tokens
        self._spent[tenant] = self._spent.get(tenant, 0) + tokens
        return True

    def unmark(self, tenant: str, tokens: int) -> None:
        self.left += tokens
        self._spent[tenant] -= tokens
