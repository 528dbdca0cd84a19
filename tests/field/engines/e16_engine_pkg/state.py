"""Per-request state that carries leases between driver calls."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class RequestState:
    req_id: str
    hashes: list[int]
    table: list[int] = field(default_factory=list)
    cow_target: int | None = None
    logits: torch.Tensor | None = None

    def drain(self) -> list[int]:
        """Hand over all block references that the request holds."""
        out, self.table = self.table, []
        return out
