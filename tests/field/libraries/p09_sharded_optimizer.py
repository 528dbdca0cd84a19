"""Optimiser whose state lives in shards reserved from a flat per-device budget."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor


@dataclass(eq=False)
class Slot:
    chunk: Tensor
    numel: int
    owner: Optional[str] = None


class StateBudget:
    """Equal chunks cut from one flat tensor; reserve() gives None when they are spent."""

    def __init__(self, chunk: int, chunks: int, device: torch.device) -> None:
        flat = torch.zeros(chunk * chunks, device=device)
        self.chunk = chunk
        self._open: List[Tensor] = list(flat.split(chunk))
        self._closed: Dict[int, Slot] = {}

    def reserve(self, numel: int, owner: Optional[str] = None) -> Optional[Slot]:
        if numel > self.chunk or not self._open:
            return None
        slot = Slot(self._open.pop(), numel, owner)  # clean: wrapped in the slot that is returned
        self._closed[id(slot)] = slot
        return slot

    def unreserve(self, slot: Slot) -> None:
        self._closed.pop(id(slot))
        slot.chunk.zero_()
        self._open.append(slot.chunk)


class ShardedAdam:
    def __init__(self, named: Iterable[Tuple[str, Tensor]], budget: StateBudget, lr: float = 1e-3) -> None:
        self.params = dict(named)
        self.budget = budget
        self.lr = lr
        self.exp_avg: Dict[str, Slot] = {}
        self.exp_avg_sq: Dict[str, Slot] = {}
        self.master: Dict[str, Slot] = {}
        self._norm: Optional[Slot] = None
        self.steps = 0

    def _ensure(self, name: str, numel: int) -> bool:
        if name in self.exp_avg:
            return True
        first = self.budget.reserve(numel, name)  # clean: near miss, rolled back or stored and later unreserved by close
        if first is None:
            return False
        second = self.budget.reserve(numel, name)  # clean: near miss, stored in the second moment table that close empties
        if second is None:
            self.budget.unreserve(first)
            return False
        self.exp_avg[name] = first
        self.exp_avg_sq[name] = second
        return True

    def _ensure_master(self, name: str, p: Tensor) -> Optional[Slot]:
        slot = self.master.get(name)
        if slot is None and p.dtype != torch.float32:
            slot = self.budget.reserve(p.numel(), name)  # leak: kept in the master table, which close never empties
            if slot is not None:
                slot.chunk[: p.numel()].copy_(p.reshape(-1))
                self.master[name] = slot
        return slot

    @torch.no_grad()
    def step(self) -> int:
        self.steps += 1
        skipped = 0
        for name, p in self.params.items():
            if p.grad is None:
                continue
            if not self._ensure(name, p.numel()):
                p.add_(p.grad, alpha=-self.lr)
                skipped += 1
                continue
            n = p.numel()
            m = self.exp_avg[name].chunk[:n]
            v = self.exp_avg_sq[name].chunk[:n]
            g = p.grad.reshape(-1).float()
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            correction = math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
            delta = (m / (v.sqrt() + 1e-8)).mul_(self.lr * correction)
            target = self._ensure_master(name, p)
            if target is not None:
                target.chunk[:n].sub_(delta)
                p.copy_(target.chunk[:n].view_as(p))
            else:
                p.sub_(delta.view_as(p))
        return skipped

    def close(self) -> None:
        for table in (self.exp_avg, self.exp_avg_sq):
            for slot in table.values():
                self.budget.unreserve(slot)
            table.clear()
        if self._norm is not None:
            self.budget.unreserve(self._norm)
            self._norm = None

    def grad_norm(self) -> float:
        if self._norm is None:
            self._norm = self.budget.reserve(len(self.params))  # clean: near miss, reserved at most once and unreserved in close
        if self._norm is None:
            return float(sum(p.grad.norm() ** 2 for p in self.params.values() if p.grad is not None)) ** 0.5
        acc = self._norm.chunk[: len(self.params)].zero_()
        for i, p in enumerate(self.params.values()):
            if p.grad is not None:
                acc[i] = p.grad.norm()
        return float(acc.norm())

    def clip(self, name: str, limit: float) -> bool:
        p = self.params[name]
        slot = self.budget.reserve(p.numel(), name)  # leak: a gradient under the limit returns without unreserve
        if slot is None or p.grad is None:
            if slot is not None:
                self.budget.unreserve(slot)
            return False
        work = slot.chunk[: p.numel()]
        work.copy_(p.grad.reshape(-1))
        norm = float(work.norm())
        if norm <= limit:
            return False
        p.grad.mul_(limit / norm)
        self.budget.unreserve(slot)
        return True

    def replace_moments(self, name: str, values: Tensor) -> bool:
        if name not in self.exp_avg:
            return False
        fresh = self.budget.reserve(values.numel(), name)  # leak: stored over the slot that was already in the table
        if fresh is None:
            return False
        fresh.chunk[: values.numel()].copy_(values.reshape(-1))
        self.exp_avg[name] = fresh
        return True

    def swap_variance(self, name: str, values: Tensor) -> bool:
        if name not in self.exp_avg_sq:
            return False
        fresh = self.budget.reserve(values.numel(), name)  # clean: near miss, the slot it replaces is taken out and unreserved
        if fresh is None:
            return False
        fresh.chunk[: values.numel()].copy_(values.reshape(-1))
        stale = self.exp_avg_sq.pop(name)
        self.exp_avg_sq[name] = fresh
        self.budget.unreserve(stale)
        return True


class ShardPlanner:
    """Tries to fit every tensor of a group before committing any of them."""

    def __init__(self, budget: StateBudget) -> None:
        self.budget = budget

    def plan(self, sizes: Dict[str, int]) -> Optional[Dict[str, Slot]]:
        got: Dict[str, Slot] = {}
        for name, n in sizes.items():
            slot = self.budget.reserve(n, name)  # clean: near miss, a failure unreserves all entries so far, else the dict goes to the caller
            if slot is None:
                for held in got.values():
                    self.budget.unreserve(held)
                return None
            got[name] = slot
        return got

    def fits(self, sizes: Dict[str, int]) -> bool:
        planned = self.plan(sizes)  # leak: the slots of a successful plan are dropped
        return planned is not None

    def run(self, sizes: Dict[str, int], body: Callable[[Dict[str, Tensor]], Any]) -> Any:
        planned = self.plan(sizes)  # clean: each slot is unreserved in the finally clause
        if planned is None:
            return body({})
        try:
            return body({name: s.chunk[: s.numel] for name, s in planned.items()})
        finally:
            for slot in planned.values():
                self.budget.unreserve(slot)
