"""Expert parallel dispatch: seats of experts and buffers of the all-to-all."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


class Seats:
    """Capacity of every expert as a counter. Seats are anonymous: what was taken must be given up."""

    def __init__(self, experts: int, capacity: int):
        self.capacity = capacity
        self.taken = [0] * experts

    def sit(self, expert: int) -> bool:
        if self.taken[expert] >= self.capacity:
            return False
        self.taken[expert] += 1
        return True

    def stand(self, expert: int) -> None:
        self.taken[expert] -= 1

    def sit_both(self, first: int, second: int) -> bool:
        if not self.sit(first):  # leak: the first seat stays taken when the second expert is full
            return False
        return self.sit(second)  # clean: both belong to the caller when it is true


class ExchangeBuffers:
    """Two tiers of send/receive buffers, small ones and large ones, each marked in a list of flags."""

    def __init__(self, small: int, large: int, numel: int):
        self.small = [torch.empty(numel, device="cuda") for _ in range(small)]
        self.large = [torch.empty(numel * 8, device="cuda") for _ in range(large)]
        self.busy = {id(t): False for t in self.small + self.large}
        self.small_numel = numel

    def reserve(self, numel: int) -> torch.Tensor | None:
        tier = self.small if numel <= self.small_numel else self.large
        for t in tier:
            if not self.busy[id(t)]:
                self.busy[id(t)] = True
                return t
        return None

    def unreserve(self, t: torch.Tensor) -> None:
        self.busy[id(t)] = False


@dataclass
class Route:
    token: int
    expert: int
    weight: float


@dataclass
class DispatchPlan:
    routes: list[Route] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    send: torch.Tensor | None = None
    recv: torch.Tensor | None = None


class Dispatcher:
    def __init__(self, seats: Seats, buffers: ExchangeBuffers, group, hidden: int):
        self.seats = seats
        self.buffers = buffers
        self.group = group
        self.hidden = hidden
        self.min_weight = 0.0

    # -- planning ---------------------------------------------------------------

    def plan(self, choices: list[tuple[int, float]]) -> DispatchPlan:
        plan = DispatchPlan()
        for token, (expert, weight) in enumerate(choices):
            if not self.seats.sit(expert):  # clean: recorded as a route of the plan, close_plan() gives it up
                plan.dropped.append(token)
                continue
            plan.routes.append(Route(token, expert, weight))
        return plan

    def plan_weighted(self, choices: list[tuple[int, float]]) -> DispatchPlan:
        plan = DispatchPlan()
        for token, (expert, weight) in enumerate(choices):
            if not self.seats.sit(expert):  # leak: `continue` for a light weight keeps the seat and adds no route
                plan.dropped.append(token)
                continue
            if weight < self.min_weight:
                plan.dropped.append(token)
                continue
            plan.routes.append(Route(token, expert, weight))
        return plan

    def plan_with_fallback(self, choices: list[tuple[int, int, float]]) -> DispatchPlan:
        plan = DispatchPlan()
        for token, (first, second, weight) in enumerate(choices):
            expert = first
            ok = self.seats.sit(first)  # clean: near miss, the fallback runs only when this one was refused
            if not ok:
                expert = second
                ok = self.seats.sit(second)  # clean: recorded as a route of the plan
            if ok:
                plan.routes.append(Route(token, expert, weight))
            else:
                plan.dropped.append(token)
        return plan

    def close_plan(self, plan: DispatchPlan) -> None:
        for r in plan.routes:
            self.seats.stand(r.expert)
        plan.routes.clear()
        for t in (plan.send, plan.recv):
            if t is not None:
                self.buffers.unreserve(t)
        plan.send = plan.recv = None

    # -- exchange ---------------------------------------------------------------

    def attach_buffers(self, plan: DispatchPlan) -> bool:
        if plan.send is not None:
            return True
        n = len(plan.routes) * self.hidden
        send = self.buffers.reserve(n)  # leak: not unreserved when no receive buffer is idle
        if send is None:
            return False
        recv = self.buffers.reserve(n)  # clean: put on the plan, which close_plan() ends
        if recv is None:
            return False
        plan.send, plan.recv = send, recv
        return True

    def exchange(self, plan: DispatchPlan, x: torch.Tensor) -> torch.Tensor | None:
        if plan.send is None or plan.recv is None:
            return None
        idx = torch.tensor([r.token for r in plan.routes], device=x.device)
        n = idx.numel() * self.hidden
        plan.send[:n].view(-1, self.hidden).copy_(x[idx])
        dist.all_to_all_single(plan.recv[:n], plan.send[:n], group=self.group)
        return plan.recv[:n].view(-1, self.hidden).clone()

    def count_exchange(self, counts: torch.Tensor) -> torch.Tensor:
        buf = self.buffers.reserve(counts.numel())  # clean: unreserved in finally when there is one
        if buf is None:
            out = torch.empty_like(counts)
            dist.all_to_all_single(out, counts, group=self.group)
            return out
        try:
            dist.all_to_all_single(buf[: counts.numel()], counts.float(), group=self.group)
            return buf[: counts.numel()].long()
        finally:
            self.buffers.unreserve(buf)

    def _packed(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor | None:
        buf = self.buffers.reserve(x.numel())  # clean: returned to the caller
        if buf is None:
            return None
        buf[: x.numel()].view_as(x).copy_(x[order])
        return buf

    def permute(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        packed = self._packed(x, order)  # leak: the packed buffer is copied and dropped
        if packed is None:
            return x[order]
        return packed[: x.numel()].view_as(x).clone()

    def permute_inplace(self, x: torch.Tensor, order: torch.Tensor) -> None:
        packed = self._packed(x, order)  # clean: unreserved after the copy back
        if packed is None:
            x.copy_(x[order])
            return
        x.copy_(packed[: x.numel()].view_as(x))
        self.buffers.unreserve(packed)

    def combine(self, y: torch.Tensor, rounds: int) -> torch.Tensor:
        total = torch.zeros_like(y)
        buf = None
        for _ in range(rounds):
            buf = self.buffers.reserve(y.numel())  # leak: rebound in every round, only the last one is unreserved
            if buf is None:
                break
            dist.all_to_all_single(buf[: y.numel()], y.reshape(-1), group=self.group)
            total.add_(buf[: y.numel()].view_as(y))
        if buf is not None:
            self.buffers.unreserve(buf)
        return total
