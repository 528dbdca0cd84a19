from __future__ import annotations

from types import TracebackType
from typing import Dict, List, Optional, Sequence, Type

import torch

from .buffers import CommBuffer, CommBuffers, ExpertResidency
from .router import Router


class ExpertGuard:
    """Keeps a set of experts resident within a block."""

    def __init__(self, residency: ExpertResidency, experts: Sequence[int]) -> None:
        self.residency = residency
        self.experts = experts
        self.entered: List[int] = []
        self.complete = False

    def __enter__(self) -> "ExpertGuard":
        for expert in self.experts:
            if not self.residency.enter(expert):  # leak: an incomplete guard makes __exit__ return before the experts exit
                return self
            self.entered.append(expert)
        self.complete = True
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], exc: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        if not self.complete:
            return
        for expert in self.entered:
            self.residency.exit(expert)
        self.entered.clear()


class MoELayer:
    def __init__(self, router: Router, buffers: CommBuffers, residency: ExpertResidency, experts: Dict[int, torch.nn.Module]) -> None:
        self.router = router
        self.buffers = buffers
        self.residency = residency
        self.experts = experts
        self.hot: List[int] = []
        self.combine: Optional[CommBuffer] = None

    def forward(self, x: torch.Tensor, step: int, replay: bool) -> Optional[torch.Tensor]:
        plan = self.router.plan(x)  # clean: near miss, retired here or remembered for the replay
        if plan is None:
            return None
        out = torch.zeros_like(x)
        start = 0
        with ExpertGuard(self.residency, plan.experts) as guard:
            for expert, count in zip(guard.entered, plan.counts):
                rows = plan.order[start : start + count] // self.router.top_k
                out[rows] += self.experts[expert](plan.buffer.data[rows])
                start += count
        if replay:
            self.router.remember(step, plan)
        else:
            self.router.retire(plan)
        return out

    def forward_shared(self, x: torch.Tensor, expert: int) -> Optional[torch.Tensor]:
        if not self.residency.enter(expert):  # clean: near miss, the refused expert is not held and the finally exits the other
            return None
        try:
            buf = self.buffers.lease_for(x.shape[0])  # clean: given up after the copy
            if buf is None:
                return self.experts[expert](x)
            buf.data[: x.shape[0]].copy_(x)
            y = self.experts[expert](buf.data[: x.shape[0]])
            self.buffers.give_up(buf)
            return y
        finally:
            self.residency.exit(expert)

    def begin_combine(self) -> bool:
        if self.combine is not None:
            self.buffers.give_up(self.combine)
        self.combine = self.buffers.lease_zeroed()  # clean: near miss, the former buffer was given up, close gives up the last
        return self.combine is not None

    def set_hot(self, experts: Sequence[int]) -> int:
        fresh: List[int] = []
        for expert in experts:
            if self.residency.enter(expert):  # leak: the list is replaced and the experts hot until now never exit
                fresh.append(expert)
        self.hot = fresh
        return len(fresh)

    def double_buffered(self, chunks: Sequence[torch.Tensor], expert: int) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        pending: Optional[CommBuffer] = None
        for chunk in chunks:
            buf = self.buffers.lease()  # clean: near miss, becomes the pending one, which the next round or the end gives up
            if buf is None:
                break
            buf.data[: len(chunk)].copy_(chunk)
            if pending is not None:
                self.buffers.give_up(pending)
            pending = buf
            outs.append(self.experts[expert](buf.data[: len(chunk)]))
        if pending is not None:
            self.buffers.give_up(pending)
        return outs

    def swap_experts(self, a: int, b: int) -> bool:
        if not self.residency.enter(a):  # leak: the refused second expert returns while the first stays in use
            return False
        if not self.residency.enter(b):  # clean: exits after the swap
            return False
        self.experts[a], self.experts[b] = self.experts[b], self.experts[a]
        self.residency.exit(b)
        self.residency.exit(a)
        return True

    def close(self) -> None:
        for expert in self.hot:
            self.residency.exit(expert)
        self.hot = []
        if self.combine is not None:
            self.buffers.give_up(self.combine)
            self.combine = None
        self.router.clear()
