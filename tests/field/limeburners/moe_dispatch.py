"""Token dispatch for mixture-of-experts layers.

Each expert has a fixed number of capacity rows in a shared arena; a dispatch reserves rows for the tokens
routed to it and hands them back when the output is written.
"""
from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, DefaultDict, Dict, Iterable, List, Optional, Sequence

import torch
from torch import nn


@dataclass(frozen=True)
class RowLease:
    expert: int
    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo


class CapacityArena:
    """Bump allocation inside each expert's rows; a lane is reset when its last lease is cancelled."""

    def __init__(self, experts: int, capacity: int, dim: int, device="cuda"):
        self.rows = torch.empty(experts, capacity, dim, device=device)
        self.capacity = capacity
        self._top = [0] * experts
        self._open = [0] * experts

    def book(self, expert: int, n: int) -> Optional[RowLease]:
        lo = self._top[expert]
        if lo + n > self.capacity:
            return None
        self._top[expert] = lo + n
        self._open[expert] += 1
        return RowLease(expert, lo, lo + n)

    def book_upto(self, expert: int, n: int) -> Optional[RowLease]:
        """As many rows as are left, at most n."""
        room = self.capacity - self._top[expert]
        return self.book(expert, min(n, room)) if room else None  # clean: returned to the caller

    def cancel(self, lease: RowLease) -> None:
        self._open[lease.expert] -= 1
        if self._open[lease.expert] == 0:
            self._top[lease.expert] = 0

    def slice(self, lease: RowLease) -> torch.Tensor:
        return self.rows[lease.expert, lease.lo:lease.hi]


def route(logits: torch.Tensor, k: int) -> Dict[int, List[int]]:
    table: DefaultDict[int, List[int]] = defaultdict(list)
    for token, experts in enumerate(logits.topk(k, -1).indices.tolist()):
        for e in experts:
            table[e].append(token)
    return table


class MoELayer(nn.Module):
    def __init__(self, arena: CapacityArena, experts: Sequence[nn.Module], k: int = 2):
        super().__init__()
        self.arena = arena
        self.experts = nn.ModuleList(experts)
        self.gate = nn.Linear(arena.rows.shape[-1], len(experts))
        self.k = k
        self.dropped = 0
        self._held: Dict[int, RowLease] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, tokens in route(self.gate(x), self.k).items():
            lease = self.arena.book_upto(e, len(tokens))  # clean: cancelled at the end of the turn, or None
            if lease is None:
                self.dropped += len(tokens)
                continue
            rows = self.arena.slice(lease)
            picked = tokens[: len(lease)]
            rows.copy_(x[picked])
            out[picked] += self.experts[e](rows)
            self.dropped += len(tokens) - len(picked)
            self.arena.cancel(lease)
        return out

    def forward_strict(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """All tokens or none: None when some expert overflows."""
        leases: Dict[int, RowLease] = {}
        table = route(self.gate(x), self.k)
        for e, tokens in table.items():
            lease = self.arena.book(e, len(tokens))  # leak: on overflow those in the dict are not cancelled
            if lease is None:
                return None
            leases[e] = lease
        out = torch.zeros_like(x)
        for e, lease in leases.items():
            rows = self.arena.slice(lease)
            rows.copy_(x[table[e]])
            out[table[e]] += self.experts[e](rows)
            self.arena.cancel(lease)
        return out

    def forward_all(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        leases: List[RowLease] = []
        table = route(self.gate(x), self.k)
        full = False
        for e, tokens in table.items():
            lease = self.arena.book(e, len(tokens))  # clean: near miss, the loop below cancels all
            if lease is None:
                full = True
                break
            leases.append(lease)
        out = None if full else torch.zeros_like(x)
        for lease in leases:
            if out is not None:
                rows = self.arena.slice(lease)
                rows.copy_(x[table[lease.expert]])
                out[table[lease.expert]] += self.experts[lease.expert](rows)
            self.arena.cancel(lease)
        return out

    def begin_dispatch(self, x: torch.Tensor) -> int:
        """First half for overlapping with the shared expert; end_dispatch is the second one."""
        for e, tokens in route(self.gate(x), 1).items():
            lease = self.arena.book(e, len(tokens))  # clean: near miss, in _held until end_dispatch
            if lease is None:
                continue
            self.arena.slice(lease).copy_(x[tokens])
            self._held[e] = lease
        return len(self._held)

    def end_dispatch(self) -> List[torch.Tensor]:
        outs = []
        for e in sorted(self._held):
            lease = self._held.pop(e)
            outs.append(self.experts[e](self.arena.slice(lease)))
            self.arena.cancel(lease)
        return outs


class BalancedLayer(MoELayer):
    """Sends overflow to the least loaded expert."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._spill: List[RowLease] = []

    def forward_balanced(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, tokens in route(self.gate(x), 1).items():
            lease = self.arena.book(e, len(tokens))  # clean: near miss, replaced only when None
            target = e
            if lease is None:
                target = min(range(len(self.experts)), key=lambda i: self.arena._top[i])
                lease = self.arena.book(target, len(tokens))  # clean: cancelled below, or None
            if lease is None:
                self.dropped += len(tokens)
                continue
            rows = self.arena.slice(lease)
            rows.copy_(x[tokens])
            out[tokens] = self.experts[target](rows)
            self.arena.cancel(lease)
        return out

    def forward_spill(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, tokens in route(self.gate(x), 1).items():
            lease = self.arena.book_upto(e, len(tokens))  # clean: cancelled below, or None
            done = 0
            if lease is not None:
                done = len(lease)
                out[tokens[:done]] = self.experts[e](self.arena.slice(lease))
                self.arena.cancel(lease)
            if done < len(tokens):
                other = (e + 1) % len(self.experts)
                rest = self.arena.book_upto(other, len(tokens) - done)  # leak: settle just drops it
                if rest is not None:
                    self._spill.append(rest)
                    out[tokens[done:done + len(rest)]] = self.arena.slice(rest)
        return out

    def settle(self) -> int:
        """Number of spilled rows since the last call."""
        n = sum(len(r) for r in self._spill)
        self._spill = []
        return n


def hold_rows(fn: Callable) -> Callable:
    """Decorator: books rows for the call, `fn(layer, rows, ...)`."""

    @functools.wraps(fn)
    def inner(layer: MoELayer, expert: int, n: int, *args):
        lease = layer.arena.book(expert, n)  # clean: cancelled in finally, or None
        if lease is None:
            return None
        try:
            return fn(layer, layer.arena.slice(lease), *args)
        finally:
            layer.arena.cancel(lease)

    return inner


@hold_rows
def expert_noise(layer: MoELayer, rows: torch.Tensor, std: float) -> float:
    rows.normal_(0.0, std)
    return float(rows.std())


def lease_stream(arena: CapacityArena, demand: Iterable[tuple]):
    """Generator of leases; the consumer owns each one it is given."""
    for expert, n in demand:
        lease = arena.book(expert, n)  # clean: yielded to the consumer, or None
        if lease is not None:
            yield lease


def replay(arena: CapacityArena, demand, sink: Callable[[torch.Tensor], None]) -> int:
    n = 0
    for lease in lease_stream(arena, demand):  # clean: each is cancelled in the body
        sink(arena.slice(lease))
        n += len(lease)
        arena.cancel(lease)
    return n


def occupancy(arena: CapacityArena, demand) -> float:
    taken = 0
    for lease in lease_stream(arena, demand):  # leak: the leases are counted and dropped
        taken += len(lease)
    return taken / max(1, arena.capacity)


def first_nonzero(arena: CapacityArena, demand) -> Optional[int]:
    for lease in lease_stream(arena, demand):  # leak: the return out of the loop keeps the lease found
        if bool(arena.slice(lease).any()):
            return lease.expert
        arena.cancel(lease)
    return None


def capacity_curve(arena: CapacityArena, expert: int, sizes: Sequence[int]) -> List[int]:
    """Largest bookable prefix of sizes, measured by booking."""
    got: List[int] = []
    stack: List[RowLease] = []
    for n in sizes:
        lease = arena.book(expert, n)  # clean: near miss, unwound from the stack
        if lease is None:
            break
        stack.append(lease)
        got.append(n)
    while stack:
        arena.cancel(stack.pop())
    return got


def probe_expert(layer: MoELayer, expert: int, x: torch.Tensor, tol: float) -> Optional[torch.Tensor]:
    lease = layer.arena.book_upto(expert, x.shape[0])  # leak: too few rows, returned without cancelling
    if lease is None or len(lease) < x.shape[0]:
        return None
    rows = layer.arena.slice(lease)
    rows.copy_(x)
    y = layer.experts[expert](rows).clone()
    layer.arena.cancel(lease)
    return y if float(y.norm()) > tol else None
