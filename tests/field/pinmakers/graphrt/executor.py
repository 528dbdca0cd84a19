"""Runs plans: op by op, with scratch per op and outputs copied out at the end."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional

import torch

from .plan import Op, Plan, PlanError

log = logging.getLogger(__name__)


class RunContext:
    """Blocks that live for one run of a plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.extra: Dict[str, list] = {}

    def add(self, op: Op, block) -> None:
        self.extra.setdefault(op.name, []).append(block)

    def end(self) -> None:
        for blocks in self.extra.values():
            for b in blocks:
                self.plan.heap.mend(b)
        self.extra.clear()


class Executor:
    def __init__(self, plan: Plan, strict: bool = False):
        self.plan = plan
        self.strict = strict

    def _args(self, op: Op) -> List[torch.Tensor]:
        p = self.plan
        return [p.blocks[name].tensor(p.shapes[name]) for name in op.inputs]

    def run(self) -> Dict[str, torch.Tensor]:
        if not self.plan.assign():  # clean: the plan keeps the blocks for the next run, unassign() mends them
            raise PlanError("plan does not fit")
        for op in self.plan.ops:
            op.fn(*self._args(op), out=self.plan.blocks[op.output].tensor(op.shape))
        return {n: self.plan.blocks[n].tensor(self.plan.shapes[n]).clone() for n in self.plan.outputs}

    def run_with_scratch(self, factor: int) -> bool:
        ctx = RunContext(self.plan)
        try:
            for op in self.plan.ops:
                block = self.plan.scratch_for(op, factor)  # clean: near miss, added to ctx, which ends in finally
                if block is None:
                    return False
                ctx.add(op, block)
                op.fn(*self._args(op), out=self.plan.blocks[op.output].tensor(op.shape))
            return True
        finally:
            ctx.end()

    def run_checked(self, factor: int) -> bool:
        for op in self.plan.ops:
            scratch = self.plan.scratch_for(op, factor)  # leak: a strict failure raises without mending the scratch
            if scratch is None:
                return False
            out = self.plan.blocks[op.output].tensor(op.shape)
            op.fn(*self._args(op), out=out)
            if not torch.isfinite(out).all():
                if self.strict:
                    raise PlanError(f"{op.name} made a value that is not finite")
                log.warning("%s made a value that is not finite", op.name)
            self.plan.heap.mend(scratch)
        return True

    def profile(self, skip: Optional[set] = None) -> Dict[str, int]:
        sizes: Dict[str, int] = {}
        for op in self.plan.ops:
            block = self.plan.scratch_for(op, 1)  # leak: an op of skip goes on to the next with the block
            if block is None:
                break
            if skip and op.name in skip:
                continue
            sizes[op.name] = block.hi - block.lo
            self.plan.heap.mend(block)
        return sizes

    def iterate(self, op: Op, steps: int) -> Optional[torch.Tensor]:
        cur = self.plan.heap.cut(op.numel)  # clean: mended at the first step or after the loop
        if cur is None:
            return None
        for _ in range(steps):
            nxt = self.plan.heap.cut(op.numel)  # clean: takes cur's place
            if nxt is None:
                break
            op.fn(cur.tensor(op.shape), out=nxt.tensor(op.shape))
            self.plan.heap.mend(cur)
            cur = nxt
        result = cur.tensor(op.shape).clone()
        self.plan.heap.mend(cur)
        return result

    def converge(self, op: Op, tol: float) -> Optional[torch.Tensor]:
        cur = self.plan.heap.cut(op.numel)  # leak: no room for the next step returns None with it
        if cur is None:
            return None
        while True:
            nxt = self.plan.heap.cut(op.numel)  # leak: as cur, no room for the step after returns None with it
            if nxt is None:
                return None
            a, b = cur.tensor(op.shape), nxt.tensor(op.shape)
            op.fn(a, out=b)
            close = float((a - b).abs().max()) < tol
            self.plan.heap.mend(cur)
            cur = nxt
            if close:
                break
        result = cur.tensor(op.shape).clone()
        self.plan.heap.mend(cur)
        return result
