"""Token dispatch for mixture-of-experts layers.

Capacity permits bound the tokens an expert may take in one step; dispatch tensors
come from a pool keyed by rounded capacity so that load changes reuse memory.
"""
from __future__ import annotations

import dataclasses
import logging
import threading
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class CapacityPermits:
    """A counter for every expert."""

    def __init__(self, n_experts: int, per_expert: int):
        self.left = [per_expert] * n_experts
        self._mu = threading.Lock()

    def admit(self, expert: int, tokens: int) -> bool:
        with self._mu:
            if self.left[expert] < tokens:
                return False
            self.left[expert] -= tokens
            return True

    def readmit(self, expert: int, tokens: int) -> None:
        with self._mu:
            self.left[expert] += tokens


class DispatchPool:
    ROUND = 128

    def __init__(self, hidden: int, device, limit: int):
        self.hidden = hidden
        self.device = device
        self.limit = limit
        self.n_out = 0
        self._shelves: Dict[int, List[torch.Tensor]] = {}

    def fetch(self, tokens: int) -> Optional[torch.Tensor]:
        rows = -(-tokens // self.ROUND) * self.ROUND
        if self.n_out >= self.limit:
            return None
        self.n_out += 1
        shelf = self._shelves.get(rows)
        if shelf:
            return shelf.pop()
        return torch.empty(rows, self.hidden, device=self.device, dtype=torch.bfloat16)

    def refile(self, t: torch.Tensor) -> None:
        self.n_out -= 1
        self._shelves.setdefault(t.shape[0], []).append(t)


class TracedPool:
    """Counts what each layer has out; otherwise as the pool beneath."""

    def __init__(self, inner: DispatchPool):
        self.inner = inner
        self.by_layer: Dict[str, int] = {}
        self.frozen: set = set()

    def fetch(self, tokens: int, layer: str) -> Optional[torch.Tensor]:
        t = self.inner.fetch(tokens)  # leak: for a frozen layer the inner tensor is dropped
        if t is None:
            return None
        if layer in self.frozen:
            log.debug("layer %s is frozen", layer)
            return None
        self.by_layer[layer] = self.by_layer.get(layer, 0) + 1
        return t

    def refile(self, t: torch.Tensor, layer: str) -> None:
        self.by_layer[layer] -= 1
        self.inner.refile(t)


@dataclasses.dataclass
class DispatchPlan:
    expert: int
    index: torch.Tensor
    send: Optional[torch.Tensor] = None
    recv: Optional[torch.Tensor] = None
    owns_send: bool = True
    work: Any = None


class ExpertDispatcher:
    def __init__(self, pool: DispatchPool, permits: CapacityPermits, group):
        self.pool = pool
        self.permits = permits
        self.group = group
        self.plans: List[DispatchPlan] = []
        self.dropped = 0

    def plan(self, x: torch.Tensor, expert: int, index: torch.Tensor) -> Optional[DispatchPlan]:
        n = index.numel()
        if not self.permits.admit(expert, n):  # leak: not readmitted when a buffer is missing
            self.dropped += n
            return None
        send = self.pool.fetch(n)  # clean: rides in the plan, refiled by finish() or on the missing receive buffer
        if send is None:
            return None
        recv = self.pool.fetch(n)  # clean: rides in the plan, refiled by finish()
        if recv is None:
            self.pool.refile(send)
            return None
        send[:n].copy_(x[index])
        plan = DispatchPlan(expert, index, send, recv)
        self.plans.append(plan)
        return plan

    def plan_shared(self, send: torch.Tensor, expert: int, index: torch.Tensor) -> Optional[DispatchPlan]:
        """Several experts read one send buffer that the caller owns."""
        n = index.numel()
        if not self.permits.admit(expert, n):  # clean: readmitted here or by finish()
            return None
        recv = self.pool.fetch(n)  # clean: near miss, owns_send=False concerns send alone, recv is refiled by finish()
        if recv is None:
            self.permits.readmit(expert, n)
            return None
        plan = DispatchPlan(expert, index, send, recv, owns_send=False)
        self.plans.append(plan)
        return plan

    def launch(self) -> None:
        for plan in self.plans:
            n = plan.index.numel()
            plan.work = dist.all_to_all_single(plan.recv[:n], plan.send[:n], group=self.group, async_op=True)

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        while self.plans:
            plan = self.plans.pop()
            if plan.work is not None:
                plan.work.wait()
                n = plan.index.numel()
                out.index_add_(0, plan.index, plan.recv[:n])
            if plan.owns_send:
                self.pool.refile(plan.send)
            self.pool.refile(plan.recv)
            self.permits.readmit(plan.expert, plan.index.numel())
        return out

    def dispatch_shared(self, x: torch.Tensor, routes: Dict[int, torch.Tensor]) -> torch.Tensor:
        send = self.pool.fetch(x.shape[0])  # clean: near miss, plans only share it, refiled here after finish()
        out = torch.zeros_like(x)
        if send is None:
            return out
        send[: x.shape[0]].copy_(x)
        for expert, index in routes.items():
            if self.plan_shared(send, expert, index) is None:  # clean: the plan is in self.plans, which finish() empties
                self.dropped += index.numel()
        self.launch()
        self.finish(out)
        self.pool.refile(send)
        return out

    def rebalance(self, loads: List[int], spill: int) -> Optional[int]:
        """Reserves room with the least loaded expert; the caller readmits it."""
        order = sorted(range(len(loads)), key=loads.__getitem__)
        for expert in order:
            if self.permits.admit(expert, spill):  # clean: handed to the caller with the expert's number
                return expert
        return None

    def spill_tokens(self, x: torch.Tensor, loads: List[int], spill: int) -> Optional[torch.Tensor]:
        expert = self.rebalance(loads, spill)  # leak: the room is not readmitted after the copy
        if expert is None:
            return None
        buf = self.pool.fetch(spill)  # clean: handed to the caller
        if buf is None:
            self.permits.readmit(expert, spill)
            return None
        buf[:spill].copy_(x[:spill])
        return buf

    def try_experts(self, x: torch.Tensor, experts: List[int]) -> Optional[Tuple[int, torch.Tensor]]:
        n = x.shape[0]
        for expert in experts:
            if not self.permits.admit(expert, n):  # clean: near miss, readmitted in the refused arm, else handed to the caller
                continue
            buf = self.pool.fetch(n)  # clean: handed to the caller with the expert
            if buf is None:
                self.permits.readmit(expert, n)
                continue
            buf[:n].copy_(x)
            return expert, buf
        return None

    def count_local(self, routes: Dict[int, torch.Tensor], local: set) -> int:
        total = 0
        for expert, index in routes.items():
            probe = self.pool.fetch(index.numel())  # leak: continue for a remote expert skips the refile
            if probe is None:
                break
            if expert not in local:
                continue
            probe[:, 0].zero_()
            total += index.numel()
            self.pool.refile(probe)
        return total


class MoELayer(torch.nn.Module):
    def __init__(self, name: str, pool: TracedPool, experts: List[torch.nn.Module], reuse: bool):
        super().__init__()
        self.name = name
        self.pool = pool
        self.experts = torch.nn.ModuleList(experts)
        self.reuse = reuse
        self._held: Optional[torch.Tensor] = None

    def _scratch(self, tokens: int) -> Optional[torch.Tensor]:
        if self.reuse and self._held is not None:
            return self._held
        t = self.pool.fetch(tokens, self.name)  # clean: near miss, kept in _held under reuse, else refiled by _unscratch()
        if self.reuse:
            self._held = t
        return t

    def _unscratch(self, t: torch.Tensor) -> None:
        if not self.reuse:
            self.pool.refile(t, self.name)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        buf = self._scratch(x.shape[0])  # clean: _unscratch() refiles it or _held keeps it
        if buf is None:
            return x
        n = x.shape[0]
        buf[:n].zero_()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if rows.numel() == 0:
                continue
            buf[rows] = expert(x[rows])
        out = buf[:n].clone()
        self._unscratch(buf)
        return out

    def aux_loss(self, logits: torch.Tensor) -> torch.Tensor:
        buf = self.pool.fetch(logits.shape[0], self.name)  # leak: refiled only in training mode
        if buf is None:
            return logits.new_zeros(())
        buf[: logits.shape[0], : logits.shape[1]].copy_(logits)
        loss = buf[: logits.shape[0], : logits.shape[1]].float().logsumexp(-1).square().mean()
        if self.training:
            self.pool.refile(buf, self.name)
        return loss

    def close(self) -> None:
        if self._held is not None:
            self.pool.refile(self._held, self.name)
            self._held = None
