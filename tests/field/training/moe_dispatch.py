import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

logger = logging.getLogger("moe")


@dataclass
class MoEArgs:
    n_experts: int = 8
    top_k: int = 2
    capacity: int = 256
    d_model: int = 512
    n_buffers: int = 12
    keep_dispatch: bool = False


class ExpertBufferPool:
    def __init__(self, args: MoEArgs):
        self.buf = torch.zeros(args.n_buffers, args.capacity, args.d_model)
        self.bitmap = torch.zeros(args.n_buffers, dtype=torch.bool)

    def alloc_rows(self) -> int:
        idle = (~self.bitmap).nonzero().flatten()
        if idle.numel() == 0:
            return -1
        i = int(idle[0])
        self.bitmap[i] = True
        return i

    def dealloc_rows(self, i: int) -> None:
        self.bitmap[i] = False


@dataclass
class DispatchPlan:
    token_idx: torch.Tensor
    weights: torch.Tensor
    buffers: Dict[int, int] = field(default_factory=dict)
    dropped: int = 0


class Dispatcher:
    def __init__(self, args: MoEArgs, pool: ExpertBufferPool):
        self.args = args
        self.pool = pool
        self.kept: List[DispatchPlan] = []

    def plan(self, gates: torch.Tensor) -> DispatchPlan:
        w, idx = gates.topk(self.args.top_k, dim=-1)
        plan = DispatchPlan(idx, w)
        for e in idx.unique().tolist():
            b = self.pool.alloc_rows()  # clean: lives in the plan, the caller finishes the plan
            if b < 0:
                plan.dropped += 1
                continue
            plan.buffers[e] = b
        return plan

    def finish(self, plan: DispatchPlan) -> None:
        for b in plan.buffers.values():
            self.pool.dealloc_rows(b)
        plan.buffers = {}

    def finish_used(self, plan: DispatchPlan, used: List[int]) -> None:
        for e, b in list(plan.buffers.items()):
            if e in used:
                self.pool.dealloc_rows(b)
                del plan.buffers[e]

    def gather(self, plan: DispatchPlan, x: torch.Tensor) -> Dict[int, torch.Tensor]:
        views = {}
        for e, b in plan.buffers.items():
            rows = (plan.token_idx == e).any(-1).nonzero().flatten()[: self.args.capacity]
            self.pool.buf[b, : rows.numel()].copy_(x[rows])
            views[e] = self.pool.buf[b, : rows.numel()]
        return views

    def flush_kept(self) -> None:
        while self.kept:
            self.finish(self.kept.pop())


class MoELayer(nn.Module):
    def __init__(self, args: MoEArgs, dispatcher: Dispatcher):
        super().__init__()
        self.args = args
        self.dispatcher = dispatcher
        self.router = nn.Linear(args.d_model, args.n_experts)
        self.experts = nn.ModuleList(nn.Linear(args.d_model, args.d_model) for _ in range(args.n_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plan = self.dispatcher.plan(F.softmax(self.router(x), dim=-1))  # clean: near miss, either kept for flush_kept or finished here
        views = self.dispatcher.gather(plan, x)
        out = sum(self.experts[e](v).sum(0) for e, v in views.items())
        if self.args.keep_dispatch:
            self.dispatcher.kept.append(plan)
        else:
            self.dispatcher.finish(plan)
        return x + out

    def forward_no_drop(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        plan = self.dispatcher.plan(F.softmax(self.router(x), dim=-1))  # leak: a plan with dropped experts is abandoned
        if plan.dropped:
            return None
        views = self.dispatcher.gather(plan, x)
        out = sum(self.experts[e](v).sum(0) for e, v in views.items())
        self.dispatcher.finish(plan)
        return x + out

    def forward_busy(self, x: torch.Tensor, min_rows: int) -> torch.Tensor:
        plan = self.dispatcher.plan(F.softmax(self.router(x), dim=-1))  # leak: buffers of experts below min_rows stay allocated
        views = self.dispatcher.gather(plan, x)
        used = [e for e, v in views.items() if v.shape[0] >= min_rows]
        out = sum(self.experts[e](views[e]).sum(0) for e in used)
        self.dispatcher.finish_used(plan, used)
        return x + out

    def load(self, x: torch.Tensor) -> Tuple[int, int]:
        plan = self.dispatcher.plan(F.softmax(self.router(x), dim=-1))  # clean: finished after the counts are read
        n, d = len(plan.buffers), plan.dropped
        self.dispatcher.finish(plan)
        return n, d

    def dropped(self, x: torch.Tensor) -> int:
        return self.dispatcher.plan(F.softmax(self.router(x), dim=-1)).dropped  # leak: the plan is dropped after reading one field


class SharedExpert(nn.Module):
    def __init__(self, args: MoEArgs, pool: ExpertBufferPool):
        super().__init__()
        self.pool = pool
        self.proj = nn.Linear(args.d_model, args.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slot = self.pool.alloc_rows()  # clean: near miss, -1 means nothing was allocated
        if slot == -1:
            return self.proj(x)
        stage = self.pool.buf[slot, : x.shape[0]]
        stage.copy_(x)
        y = self.proj(stage)
        self.pool.dealloc_rows(slot)
        return y

    def forward_guarded(self, x: torch.Tensor) -> torch.Tensor:
        slot = self.pool.alloc_rows()  # leak: slot 0 is a valid allocation but fails the truth test
        if slot > 0:
            stage = self.pool.buf[slot, : x.shape[0]]
            stage.copy_(x)
            y = self.proj(stage)
            self.pool.dealloc_rows(slot)
            return y
        return self.proj(x)
