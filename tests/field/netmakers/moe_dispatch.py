"""Expert-parallel token dispatch. Send/receive regions are cut from one arena."""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


class Region(NamedTuple):
    start: int
    size: int


class ArenaFull(RuntimeError):
    pass


class TokenArena:
    """First-fit allocator of row ranges over one (rows, hidden) tensor."""

    def __init__(self, rows: int, hidden: int, device: torch.device, dtype=torch.bfloat16) -> None:
        self.data = torch.empty(rows, hidden, device=device, dtype=dtype)
        self._holes: list[tuple[int, int]] = [(0, rows)]

    def carve(self, rows: int) -> Region:
        r = self.try_carve(rows)  # clean: handed to the caller
        if r is None:
            raise ArenaFull(f"{rows} rows wanted, largest hole {self.largest()}")
        return r

    def try_carve(self, rows: int) -> Region | None:
        for i, (start, size) in enumerate(self._holes):
            if size < rows:
                continue
            if size == rows:
                del self._holes[i]
            else:
                self._holes[i] = (start + rows, size - rows)
            return Region(start, rows)
        return None

    def merge(self, region: Region) -> None:
        i = bisect.bisect_left(self._holes, (region.start, 0))
        self._holes.insert(i, (region.start, region.size))
        if i + 1 < len(self._holes) and sum(self._holes[i]) == self._holes[i + 1][0]:
            self._holes[i] = (self._holes[i][0], self._holes[i][1] + self._holes.pop(i + 1)[1])
        if i and sum(self._holes[i - 1]) == self._holes[i][0]:
            self._holes[i - 1] = (self._holes[i - 1][0], self._holes[i - 1][1] + self._holes.pop(i)[1])

    def largest(self) -> int:
        return max((size for _, size in self._holes), default=0)

    def rows(self, r: Region) -> torch.Tensor:
        return self.data[r.start:r.start + r.size]


@dataclass
class Plan:
    order: torch.Tensor
    send_counts: list[int]
    recv_counts: list[int]
    send: Region | None = None
    recv: Region | None = None


class Dispatcher:
    def __init__(self, arena: TokenArena, group, n_experts: int) -> None:
        self.arena = arena
        self.group = group
        self.n_experts = n_experts
        self.open_plans: dict[int, Plan] = {}

    def plan(self, expert_ids: torch.Tensor) -> Plan:
        order = expert_ids.argsort(stable=True)
        counts = torch.bincount(expert_ids, minlength=self.n_experts)
        world = dist.get_world_size(self.group)
        send = counts.view(world, -1).sum(1)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send, group=self.group)
        return Plan(order, send.tolist(), recv.tolist())

    def reserve(self, plan: Plan) -> bool:
        send = self.arena.try_carve(sum(plan.send_counts))  # clean: near miss, merged when the receive side does not fit, else kept in the plan
        if send is None:
            return False
        recv = self.arena.try_carve(sum(plan.recv_counts))  # clean: kept in the plan, merged by retire
        if recv is None:
            self.arena.merge(send)
            return False
        plan.send, plan.recv = send, recv
        return True

    def reserve_strict(self, plan: Plan) -> None:
        send = self.arena.carve(sum(plan.send_counts))  # leak: the second carve raises ArenaFull before send is in the plan
        recv = self.arena.carve(sum(plan.recv_counts))  # clean: kept in the plan, merged by retire
        plan.send = send
        plan.recv = recv

    def retire(self, plan: Plan) -> None:
        for r in (plan.send, plan.recv):
            if r is not None:
                self.arena.merge(r)
        plan.send = plan.recv = None

    def dispatch(self, layer: int, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor | None:
        plan = self.plan(expert_ids)
        if not self.reserve(plan):  # clean: the plan goes into open_plans and combine retires it
            return None
        self.arena.rows(plan.send).copy_(x[plan.order])
        dist.all_to_all_single(
            self.arena.rows(plan.recv), self.arena.rows(plan.send),
            plan.recv_counts, plan.send_counts, group=self.group,
        )
        stale = self.open_plans.pop(layer, None)
        if stale is not None:
            self.retire(stale)
        self.open_plans[layer] = plan
        return self.arena.rows(plan.recv)

    def combine(self, layer: int, y: torch.Tensor) -> torch.Tensor:
        plan = self.open_plans.pop(layer)
        self.arena.rows(plan.recv).copy_(y)
        dist.all_to_all_single(
            self.arena.rows(plan.send), self.arena.rows(plan.recv),
            plan.send_counts, plan.recv_counts, group=self.group,
        )
        out = torch.empty_like(self.arena.rows(plan.send))
        out[plan.order] = self.arena.rows(plan.send)
        self.retire(plan)
        return out

    def shutdown(self) -> None:
        for plan in self.open_plans.values():
            self.retire(plan)
        self.open_plans.clear()

    def rehearse(self, expert_ids: torch.Tensor) -> bool:
        plan = self.plan(expert_ids)
        ok = self.reserve(plan)  # leak: an unbalanced plan returns False with both regions in a local plan
        if not ok:
            return False
        mean = sum(plan.send_counts) / len(plan.send_counts)
        if max(plan.send_counts) > 2 * mean:
            return False
        self.retire(plan)
        return True


class ExpertRunner:
    def __init__(self, arena: TokenArena, experts: torch.nn.ModuleList, capacity: int) -> None:
        self.arena = arena
        self.experts = experts
        self.capacity = capacity
        self.overflow: list[Region] = []

    def run(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        out = torch.empty_like(x)
        off = 0
        for expert, n in zip(self.experts, counts):
            r = self.arena.try_carve(max(n, 1))  # leak: experts with no tokens continue without a merge
            if r is None:
                out[off:off + n] = expert(x[off:off + n])
                off += n
                continue
            if n == 0:
                continue
            h = self.arena.rows(r)
            h.copy_(x[off:off + n])
            out[off:off + n] = expert(h)
            self.arena.merge(r)
            off += n
        return out

    def run_capped(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        out = torch.zeros_like(x)
        r = self.arena.carve(self.capacity)  # clean: one region serves every expert, merged in finally
        try:
            off = 0
            for expert, n in zip(self.experts, counts):
                if n == 0:
                    continue
                m = min(n, self.capacity)
                h = self.arena.rows(r)[:m]
                h.copy_(x[off:off + m])
                out[off:off + m] = expert(h)
                off += n
            return out
        finally:
            self.arena.merge(r)

    def set_aside(self, x: torch.Tensor) -> int:
        r = self.arena.carve(x.shape[0])  # clean: kept in self.overflow, merged by replay
        self.arena.rows(r).copy_(x)
        self.overflow.append(r)
        return len(self.overflow) - 1

    def replay(self, expert: torch.nn.Module) -> list[torch.Tensor]:
        outs = []
        while self.overflow:
            r = self.overflow.pop(0)
            outs.append(expert(self.arena.rows(r)).clone())
            self.arena.merge(r)
        return outs

    def grow(self, r: Region, rows: int) -> Region:
        """A bigger region with the same leading rows. The old one is given up."""
        bigger = self.arena.carve(rows)  # clean: returned in place of r, which is merged
        self.arena.rows(bigger)[: r.size].copy_(self.arena.rows(r))
        self.arena.merge(r)
        return bigger

    def collect(self, parts: list[torch.Tensor]) -> torch.Tensor:
        r = self.arena.carve(parts[0].shape[0])  # leak: grow() merges the old region, but the last one is never merged
        self.arena.rows(r).copy_(parts[0])
        for p in parts[1:]:
            used = r.size
            r = self.grow(r, used + p.shape[0])  # leak: the region after the last part is cloned and dropped
            self.arena.rows(r)[used:].copy_(p)
        return self.arena.rows(r).clone()
