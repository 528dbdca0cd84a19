"""Parameter coordinator of a ZeRO-3 style engine: fetches partitioned parameters ahead of their use.

Two things are counted here. ParamTable keeps a use count per parameter, and the gathered copy lives while the
count is above zero. TicketBook hands out the slots for gathers in flight, of which there are only a few.
"""
from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Iterable

import torch
import torch.distributed as dist


@dataclass
class Param:
    key: int
    nbytes: int
    shard: torch.Tensor
    persistent: bool = False
    full: torch.Tensor | None = None
    uses: int = 0


class ParamTable:
    def __init__(self, params: Iterable[Param]):
        self.params = {p.key: p for p in params}
        self.resident = 0

    def retain(self, key: int) -> Param:
        p = self.params[key]
        p.uses += 1
        if p.uses == 1:
            p.full = torch.empty(p.nbytes // 2, dtype=torch.bfloat16, device="cuda")
            self.resident += p.nbytes
        return p

    def drop(self, key: int) -> None:
        p = self.params[key]
        p.uses -= 1
        if p.uses == 0:
            p.full = None
            self.resident -= p.nbytes


@dataclass
class Ticket:
    slot: int
    key: int = -1
    work: object = None


class TicketBook:
    def __init__(self, slots: int):
        self._idle = collections.deque(Ticket(i) for i in range(slots))

    def issue(self, key: int) -> Ticket | None:
        if not self._idle:
            return None
        t = self._idle.popleft()
        t.key = key
        return t

    def settle(self, t: Ticket) -> None:
        t.key, t.work = -1, None
        self._idle.append(t)


@dataclass
class Trace:
    order: list[int] = field(default_factory=list)
    valid: bool = False


class Coordinator:
    def __init__(self, table: ParamTable, book: TicketBook, budget: int):
        self.table = table
        self.book = book
        self.budget = budget
        self.trace = Trace()
        self.inflight: dict[int, Ticket] = {}
        self.held: dict[str, list[int]] = {}

    # -- prefetching ---------------------------------------------------------------------------------------
    def look_ahead(self, at: int, depth: int) -> int:
        """Starts gathers for the next `depth` parameters of the trace."""
        started = 0
        for key in self.trace.order[at : at + depth]:
            if key in self.inflight:
                continue
            t = self.book.issue(key)  # leak: reset_trace clears inflight without settle
            if t is None:
                break
            p = self.table.params[key]
            t.work = dist.all_gather_into_tensor(torch.empty_like(p.shard), p.shard, async_op=True)
            self.inflight[key] = t
            started += 1
        return started

    def wait_for(self, key: int) -> None:
        t = self.inflight.pop(key, None)
        if t is None:
            return
        t.work.wait()
        self.book.settle(t)

    def reset_trace(self) -> None:
        self.trace = Trace()
        self.inflight.clear()

    # -- module hooks --------------------------------------------------------------------------------------
    def pre_module(self, name: str, keys: list[int]) -> None:
        for key in keys:
            self.wait_for(key)
            self.table.retain(key)  # clean: near miss, listed in held, post_module drops the list
        self.held.setdefault(name, []).extend(keys)

    def post_module(self, name: str) -> None:
        for key in self.held.pop(name, ()):
            self.table.drop(key)

    def pre_backward(self, keys: list[int], recompute: bool) -> None:
        for key in keys:
            self.table.retain(key)  # clean: post_backward drops each of them
            if recompute:
                self.table.retain(key)  # clean: near miss, the same flag drops it in post_backward

    def post_backward(self, keys: list[int], recompute: bool) -> None:
        for key in keys:
            self.table.drop(key)
            if recompute:
                self.table.drop(key)


def forward_module(table: ParamTable, module, keys: list[int], x: torch.Tensor) -> torch.Tensor:
    for key in keys:
        table.retain(key)  # leak: in evaluation mode nothing drops it
    y = module(x)
    if module.training:
        for key in keys:
            table.drop(key)
    return y


def forward_checked(table: ParamTable, module, keys: list[int], x: torch.Tensor) -> torch.Tensor:
    gather = any(not table.params[k].persistent for k in keys)
    if gather:
        for key in keys:
            table.retain(key)  # clean: near miss, the drop stands under the same unchanged flag
    y = module(x)
    if gather:
        for key in keys:
            table.drop(key)
    return y


def warm_up(table: ParamTable, keys: list[int], budget: int) -> list[int]:
    """Gathers as many parameters as the budget allows; the caller drops those listed."""
    got = []
    for key in keys:
        p = table.retain(key)  # leak: the one that goes over the budget is neither listed nor dropped
        if table.resident > budget:
            break
        p.full[: p.shard.numel()].copy_(p.shard)
        got.append(key)
    return got


def first_step(table: ParamTable, keys: list[int], budget: int, step) -> int:
    got = warm_up(table, keys, budget)  # clean: every listed key is dropped
    step([table.params[k].full for k in got])
    for key in got:
        table.drop(key)
    return len(got)


def param_checksum(table: ParamTable, key: int, only_resident: bool) -> float | None:
    p = table.retain(key)  # leak: the mismatch return leaves the count raised
    if only_resident and p.uses == 1:
        return None
    total = float(p.full.float().sum())
    table.drop(key)
    return total


def param_norms(table: ParamTable, keys: list[int]) -> dict[int, float]:
    norms = {}
    for key in keys:
        p = table.retain(key)  # clean: finally drops it on the continue as well
        try:
            if p.shard.numel() == 0:
                continue
            norms[key] = float(p.full.float().norm())
        finally:
            table.drop(key)
    return norms


def tie_weights(table: ParamTable, src: int, dst: int) -> None:
    a = table.retain(src)  # clean: dropped last
    b = table.retain(dst)  # leak: the second drop names src again
    b.full.copy_(a.full)
    b.shard.copy_(a.shard)
    table.drop(a.key)
    if b.persistent:
        b.shard = a.shard
    table.drop(src)
