from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

import torch

from .buffers import CommBuffer, CommBuffers


@dataclass
class Plan:
    experts: List[int]
    counts: List[int]
    order: torch.Tensor
    buffer: CommBuffer


class Router:
    def __init__(self, gate: torch.nn.Linear, top_k: int, buffers: CommBuffers) -> None:
        self.gate = gate
        self.top_k = top_k
        self.buffers = buffers
        self.replays: Dict[int, Plan] = {}

    def plan(self, x: torch.Tensor) -> Optional[Plan]:
        buf = self.buffers.lease_for(x.shape[0])  # clean: near miss, given up for an empty batch, otherwise in the plan
        if buf is None:
            return None
        if x.shape[0] == 0:
            self.buffers.give_up(buf)
            return None
        chosen = self.gate(x).topk(self.top_k, dim=-1).indices.flatten()
        experts, counts = torch.unique(chosen, return_counts=True)
        order = chosen.argsort()
        buf.data[: x.shape[0]].copy_(x)
        return Plan(experts.tolist(), counts.tolist(), order, buf)

    def retire(self, plan: Plan) -> None:
        self.buffers.give_up(plan.buffer)

    def remember(self, step: int, plan: Plan) -> None:
        old = self.replays.pop(step, None)
        if old is not None:
            self.retire(old)
        self.replays[step] = plan

    def load_statistics(self, x: torch.Tensor) -> Dict[int, int]:
        plan = self.plan(x)  # leak: the counts are copied out and the plan is dropped with its buffer
        if plan is None:
            return {}
        return dict(zip(plan.experts, plan.counts))

    def imbalance(self, x: torch.Tensor) -> float:
        plan = self.plan(x)  # clean: near miss, retired before either return
        if plan is None:
            return 0.0
        worst, total = max(plan.counts), sum(plan.counts)
        self.retire(plan)
        if total == 0:
            return 0.0
        return worst * len(plan.counts) / total

    def clear(self) -> None:
        for step in list(self.replays):
            self.retire(self.replays.pop(step))
