from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .budget import Grant, RowSlots, TokenBudget


@dataclass
class Request:
    rid: str
    prompt_len: int
    priority: int = 0
    row: int = -1
    grant: Optional[Grant] = None
    out: list[int] = field(default_factory=list)
    aborted: bool = False

    def release(self, budget: TokenBudget, rows: RowSlots) -> None:
        if self.grant is not None:
            budget.refund(self.grant)
            self.grant = None
        if self.row >= 0:
            rows.unclaim(self.row)
            self.row = -1
