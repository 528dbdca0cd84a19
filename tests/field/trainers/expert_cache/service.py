"""What the model's forward talks to."""
from __future__ import annotations

from typing import Dict, List

import torch

from .lease import SlotLease, acquire_lease_checked
from .swapper import ExpertSwapper


class ExpertService:
    def __init__(self, swapper: ExpertSwapper, hidden: int):
        self.swapper = swapper
        self.hidden = hidden
        self._pinned: Dict[int, SlotLease] = {}

    def _matrix(self, lease: SlotLease) -> torch.Tensor:
        return lease.weights[: self.hidden * self.hidden].view(self.hidden, self.hidden)

    def apply(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        lease = self.swapper.get(expert)  # clean: near miss, None falls back to host weights, the rest lets go
        if lease is None:
            w = self.swapper.host[expert].to(x.device)
            return x @ w[: self.hidden * self.hidden].view(self.hidden, self.hidden)
        y = x @ self._matrix(lease)
        lease.let_go()
        return y

    def norms(self, experts: List[int]) -> Dict[int, float]:
        out: Dict[int, float] = {}
        for e in experts:
            lease = self.swapper.get(e)  # leak: the hold is never let go
            if lease is not None:
                out[e] = self._matrix(lease).float().norm().item()
        return out

    def pin(self, expert: int) -> bool:
        if expert in self._pinned:
            return True
        lease = self.swapper.get(expert)  # clean: near miss, stored under an expert not pinned so far, unpin_all() lets go
        if lease is None:
            return False
        self._pinned[expert] = lease
        return True

    def unpin_all(self) -> None:
        for lease in self._pinned.values():
            lease.let_go()
        self._pinned.clear()

    def self_test(self, timeout: float = 1.0) -> bool:
        for e, src in self.swapper.host.items():
            lease = acquire_lease_checked(self.swapper.table, e, src, timeout)  # leak: only tested against None and dropped
            if lease is None:
                return False
        return True
