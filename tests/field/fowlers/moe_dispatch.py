"""Token dispatch of a mixture-of-experts layer: row ranges of expert buffers are leased."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Optional, Protocol, Sequence

import torch
import torch.distributed as dist


class RowLease:
    """A range of rows in an expert's buffer. close() puts the range back, once."""

    __slots__ = ("_owner", "start", "count", "_open")

    def __init__(self, owner: "ExpertBuffer", start: int, count: int) -> None:
        self._owner, self.start, self.count = owner, start, count
        self._open = True

    @property
    def rows(self) -> torch.Tensor:
        return self._owner.data[self.start:self.start + self.count]

    def close(self) -> None:
        if self._open:
            self._open = False
            self._owner._put_back(self.start, self.count)


class RowSource(Protocol):
    def lease_rows(self, n: int) -> Optional[RowLease]: ...


class ExpertBuffer:
    """One expert's capacity; leases of rows, None when no range is long enough."""

    def __init__(self, capacity: int, dim: int) -> None:
        self.data = torch.empty(capacity, dim)
        self._holes: list[tuple[int, int]] = [(0, capacity)]

    def lease_rows(self, n: int) -> Optional[RowLease]:
        for i, (start, count) in enumerate(self._holes):
            if count >= n:
                if count == n:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + n, count - n)
                return RowLease(self, start, n)
        return None

    def _put_back(self, start: int, count: int) -> None:
        self._holes.append((start, count))
        self._holes.sort()
        merged = [self._holes[0]]
        for s, c in self._holes[1:]:
            ps, pc = merged[-1]
            if ps + pc == s:
                merged[-1] = (ps, pc + c)
            else:
                merged.append((s, c))
        self._holes = merged


@dataclass
class Routing:
    expert: int
    tokens: torch.Tensor
    weight: torch.Tensor


@dataclass
class Dispatched:
    routing: Routing
    lease: RowLease
    out: Optional[torch.Tensor] = None
    tags: list[str] = field(default_factory=list)


class Dispatcher(ABC):
    def __init__(self, buffers: Sequence[RowSource]) -> None:
        self.buffers = buffers
        self.overflow = 0

    @abstractmethod
    def dispatch(self, routings: Sequence[Routing]) -> list[Dispatched]: ...

    def place(self, routing: Routing) -> Optional[RowLease]:
        lease = self.buffers[routing.expert].lease_rows(len(routing.tokens))  # clean: handed on to the caller
        if lease is not None:
            lease.rows.copy_(routing.tokens)
        return lease

    def combine(self, items: Sequence[Dispatched], like: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(like)
        for item in items:
            total[: item.lease.count].add_(item.out * item.routing.weight)
            item.lease.close()
        return total


class CapacityDispatcher(Dispatcher):
    """Tokens that find no room are dropped."""

    def dispatch(self, routings: Sequence[Routing]) -> list[Dispatched]:
        out = []
        for routing in routings:
            lease = self.place(routing)  # clean: near miss, in the list that combine() closes
            if lease is None:
                self.overflow += len(routing.tokens)
                continue
            out.append(Dispatched(routing, lease))
        return out

    def forward(self, routings: Sequence[Routing], experts, like: torch.Tensor) -> torch.Tensor:
        items = self.dispatch(routings)  # clean: combine closes every lease
        for item in items:
            item.out = experts[item.routing.expert](item.lease.rows)
        return self.combine(items, like)

    def forward_top1(self, routings: Sequence[Routing], experts) -> Optional[torch.Tensor]:
        items = self.dispatch(routings)  # leak: all but the first are left when only one result is wanted
        if not items:
            return None
        head = items[0]
        result = experts[head.routing.expert](head.lease.rows).clone()
        head.lease.close()
        return result


class StrictDispatcher(Dispatcher):
    """All tokens or none."""

    def dispatch(self, routings: Sequence[Routing]) -> list[Dispatched]:
        out: list[Dispatched] = []
        for routing in routings:
            lease = self.place(routing)  # clean: near miss, closed in the rollback or handed on
            if lease is None:
                for item in out:
                    item.lease.close()
                return []
            out.append(Dispatched(routing, lease))
        return out


class PairDispatcher(Dispatcher):
    """Top-2 routing: both experts of a token must have room."""

    def dispatch(self, routings: Sequence[Routing]) -> list[Dispatched]:
        out: list[Dispatched] = []
        for first, second in zip(routings[::2], routings[1::2]):
            a = self.place(first)  # leak: dropped when the second expert has no room
            if a is None:
                self.overflow += 1
                continue
            b = self.place(second)  # clean: handed on in the list
            if b is None:
                self.overflow += 1
                continue
            out.append(Dispatched(first, a))
            out.append(Dispatched(second, b))
        return out


class LruWindow:
    """As ReceiveWindow, but an old range makes room for a new one."""

    def __init__(self, source: RowSource, limit: int) -> None:
        self._source, self._limit = source, limit
        self._by_rank: "OrderedDict[int, RowLease]" = OrderedDict()

    def expect(self, rank: int, n: int) -> bool:
        if len(self._by_rank) >= self._limit:
            self._by_rank.popitem(last=False)
        lease = self._source.lease_rows(n)  # leak: the eviction pops the oldest lease without closing it
        if lease is None:
            return False
        previous = self._by_rank.pop(rank, None)
        if previous is not None:
            previous.close()
        self._by_rank[rank] = lease
        return True

    def arrived(self, rank: int) -> torch.Tensor:
        lease = self._by_rank.pop(rank)
        tokens = lease.rows.clone()
        lease.close()
        return tokens

    def close(self) -> None:
        for lease in self._by_rank.values():
            lease.close()
        self._by_rank.clear()


def exchange_counts(source: RowSource, world: int) -> Optional[list[int]]:
    send = source.lease_rows(world)  # clean: closed on each way on which it is not None
    if send is None:
        return None
    recv = source.lease_rows(world)  # leak: not closed after the exchange
    if recv is None:
        send.close()
        return None
    dist.all_to_all_single(recv.rows, send.rows)
    counts = [int(x) for x in recv.rows[:, 0]]
    send.close()
    return counts


def grow(source: RowSource, old: Optional[RowLease], n: int) -> Optional[RowLease]:
    """A longer lease with the old one's rows; the old one is closed, or kept when it is long enough."""
    if old is not None and old.count >= n:
        return old
    new = source.lease_rows(n)  # clean: near miss, returned
    if new is not None and old is not None:
        new.rows[: old.count].copy_(old.rows)
    if old is not None:
        old.close()
    return new


def gather_variable(source: RowSource, parts: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
    lease: Optional[RowLease] = None
    filled = 0
    for part in parts:
        lease = grow(source, lease, filled + len(part))  # clean: near miss, grow closes the one it replaces
        if lease is None:
            return None
        lease.rows[filled:filled + len(part)].copy_(part)
        filled += len(part)
    if lease is None:
        return None
    result = lease.rows[:filled].clone()
    lease.close()
    return result


def token_norms(source: RowSource, tokens: torch.Tensor) -> torch.Tensor:
    lease = source.lease_rows(len(tokens))  # leak: the view goes into a new tensor and the lease is dropped
    if lease is None:
        return tokens.norm(dim=-1)
    lease.rows.copy_(tokens).pow_(2)
    return lease.rows.sum(-1).sqrt_()
