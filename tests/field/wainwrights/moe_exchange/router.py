from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

from .windows import Window, WindowPool


@dataclass
class Plan:
    """Which rows go to which peer.  The windows listed here are the plan's until dispose()."""

    rows: Dict[int, torch.Tensor] = field(default_factory=dict)
    windows: Dict[int, List[Window]] = field(default_factory=dict)
    spare: Optional[Window] = None
    dropped: int = 0

    def dispose(self, pool: WindowPool) -> None:
        for ws in self.windows.values():
            for w in ws:
                pool.close(w)
        self.windows.clear()
        self.spare = None


class Router:
    def __init__(self, gate, pool: WindowPool, experts_per_rank: int, k: int = 2, capacity: int = 4096):
        self.gate, self.pool = gate, pool
        self.experts_per_rank, self.k, self.capacity = experts_per_rank, k, capacity

    def assign(self, x):
        probs = torch.softmax(self.gate(x).float(), -1)
        weight, expert = probs.topk(self.k, -1)
        return weight, torch.div(expert, self.experts_per_rank, rounding_mode="floor")

    def plan(self, x, ranks: List[int], want_spare: bool) -> Optional[Plan]:
        _, owner = self.assign(x)
        plan = Plan()
        if want_spare:
            plan.spare = self.pool.open()  # leak: Plan.dispose() sets the spare to None without closing it
        for r in ranks:
            rows = (owner == r).any(-1).nonzero().flatten()
            if len(rows) > self.capacity:
                plan.dropped += len(rows) - self.capacity
                rows = rows[: self.capacity]
            ws = self.pool.open_for(len(rows))  # clean: near miss, in the plan at once, and dispose() closes the lists of a plan given up
            if len(rows) and not ws:
                plan.dispose(self.pool)
                return None
            plan.rows[r], plan.windows[r] = rows, ws
        return plan

    def balance(self, x, ranks: List[int]) -> List[int]:
        w = self.pool.open("balance")  # clean: closed by its tag
        _, owner = self.assign(x)
        for i, r in enumerate(ranks):
            w.tensor[0, i] = (owner == r).sum()
        counts = [int(c) for c in w.tensor[0, : len(ranks)]]
        self.pool.close_tag("balance")
        return counts
