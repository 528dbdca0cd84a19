"""Token dispatch and combine for mixture-of-experts layers, over rented exchange buffers."""
from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Optional, Sequence

import torch


class ExchangePool:
    """Flat exchange buffers; rented by number of rows."""

    def __init__(self, width: int, device: str = "cuda") -> None:
        self.width = width
        self.device = device
        self._stock: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.rented = 0

    @staticmethod
    def _round(rows: int) -> int:
        return max(64, 1 << (max(1, rows) - 1).bit_length())

    def rent(self, rows: int) -> torch.Tensor:
        size = self._round(rows)
        self.rented += 1
        if self._stock[size]:
            return self._stock[size].pop()
        return torch.empty(size, self.width, device=self.device)

    def hand_back(self, buf: torch.Tensor) -> None:
        self.rented -= 1
        self._stock[buf.shape[0]].append(buf)


Expert = Callable[[torch.Tensor], torch.Tensor]


class ExpertInput:
    """Rows bound for one expert; ``drop`` hands the buffer back if it is ours."""

    def __init__(self, pool: ExchangePool, buf: torch.Tensor, rows: int, owned: bool) -> None:
        self._pool = pool
        self.buf = buf
        self.rows = rows
        self._owned = owned

    def view(self) -> torch.Tensor:
        return self.buf[: self.rows]

    def drop(self) -> None:
        if self._owned:
            self._pool.hand_back(self.buf)
            self._owned = False


@dataclass
class DispatchPlan:
    pool: ExchangePool
    buf: torch.Tensor
    order: torch.Tensor
    counts: list[int]

    def combine(self, gates: torch.Tensor) -> torch.Tensor:
        """Undo the permutation; ends the plan."""
        n = self.order.numel()
        out = torch.empty(n, self.pool.width)
        out[self.order] = self.buf[:n]
        self.pool.hand_back(self.buf)
        return out * gates.unsqueeze(1)

    def discard(self) -> None:
        self.pool.hand_back(self.buf)


def make_plan(pool: ExchangePool, x: torch.Tensor, expert_of: torch.Tensor, n_experts: int) -> DispatchPlan:
    order = torch.argsort(expert_of)
    buf = pool.rent(x.shape[0])  # clean: near miss, owned by the returned plan
    buf[: x.shape[0]].copy_(x[order])
    counts = torch.bincount(expert_of, minlength=n_experts).tolist()
    return DispatchPlan(pool, buf, order, counts)


def moe_layer(pool: ExchangePool, x, expert_of, gates, experts: Sequence[Expert]) -> torch.Tensor:
    plan = make_plan(pool, x, expert_of, len(experts))  # clean: near miss, combine() ends it
    lo = 0
    for expert, n in zip(experts, plan.counts):
        if n:
            plan.buf[lo:lo + n].copy_(expert(plan.buf[lo:lo + n]))
        lo += n
    return plan.combine(gates)


def moe_layer_capped(
    pool: ExchangePool, x, expert_of, gates, experts: Sequence[Expert], cap: int
) -> torch.Tensor:
    plan = make_plan(pool, x, expert_of, len(experts))  # leak: the overload return skips combine
    if max(plan.counts) > cap:
        return x
    lo = 0
    for expert, n in zip(experts, plan.counts):
        plan.buf[lo:lo + n].copy_(expert(plan.buf[lo:lo + n]))
        lo += n
    return plan.combine(gates)


def shared_expert_layer(
    pool: ExchangePool, x: torch.Tensor, experts: Sequence[Expert], shared: Expert
) -> torch.Tensor:
    bufs = [pool.rent(x.shape[0]) for _ in range(len(experts) + 1)]  # leak: zip stops before the last
    n = x.shape[0]
    for buf, expert in zip(bufs, experts):
        buf[:n].copy_(expert(x))
    bufs[-1][:n].copy_(shared(x))
    out = torch.stack([b[:n] for b in bufs]).sum(0)
    for buf, _ in zip(bufs, experts):
        pool.hand_back(buf)
    return out


def split_by_expert(
    pool: ExchangePool, x: torch.Tensor, expert_of: torch.Tensor, chunk: int
) -> dict[int, torch.Tensor]:
    """Mean input of every expert, staged through chunked buffers."""
    staged: dict[int, list[torch.Tensor]] = defaultdict(list)
    for e in expert_of.unique().tolist():
        rows = x[expert_of == e]
        for part in rows.split(chunk):
            buf = pool.rent(part.shape[0])  # leak: only the first chunk of each expert is handed back
            buf[: part.shape[0]].copy_(part)
            staged[e].append(buf)
    means = {}
    for e, bufs in staged.items():
        means[e] = torch.cat(bufs).mean(0)
        pool.hand_back(bufs[0])
    return means


def top2(pool: ExchangePool, x: torch.Tensor, first: Expert, second: Optional[Expert]) -> torch.Tensor:
    n = x.shape[0]
    a = pool.rent(n)  # clean: handed back at the end
    b = pool.rent(n) if second is not None else None  # clean: near miss, tested before it is handed back
    a[:n].copy_(first(x))
    out = a[:n].clone()
    if b is not None:
        b[:n].copy_(second(x))
        out += b[:n]
        pool.hand_back(b)
    pool.hand_back(a)
    return out


def wrap_rows(pool: ExchangePool, rows: torch.Tensor) -> ExpertInput:
    buf = pool.rent(rows.shape[0])  # clean: near miss, owned by the wrapper, its drop() hands it back
    buf[: rows.shape[0]].copy_(rows)
    return ExpertInput(pool, buf, rows.shape[0], owned=True)


def run_on_view(pool: ExchangePool, rows: torch.Tensor, expert: Expert) -> torch.Tensor:
    buf = pool.rent(rows.shape[0])  # leak: wrapped with owned=False, so drop() leaves it
    buf[: rows.shape[0]].copy_(rows)
    item = ExpertInput(pool, buf, rows.shape[0], owned=False)
    out = expert(item.view()).clone()
    item.drop()
    return out


def run_wrapped(pool: ExchangePool, rows: torch.Tensor, expert: Expert) -> torch.Tensor:
    item = wrap_rows(pool, rows)  # clean: dropped after use
    out = expert(item.view()).clone()
    item.drop()
    return out


def dispatch_async(
    pool: ExchangePool, x: torch.Tensor, send: Callable[[torch.Tensor, Callable[[], None]], None]
) -> None:
    """``send`` calls back when the buffer may be reused."""
    buf = pool.rent(x.shape[0])  # clean: near miss, the completion callback hands it back
    buf[: x.shape[0]].copy_(x)
    send(buf[: x.shape[0]], functools.partial(pool.hand_back, buf))


def dispatch_quantised(
    pool: ExchangePool, x: torch.Tensor, send: Callable[[torch.Tensor, Callable[[], None]], None]
) -> None:
    """Rows and their scales travel in two buffers."""
    n = x.shape[0]
    data = pool.rent(n)  # clean: near miss, the completion callback hands it back
    scales = pool.rent(n)  # leak: the callback knows the data buffer only
    scales[:n, 0].copy_(x.abs().amax(1))
    data[:n].copy_(x / scales[:n, :1])

    def complete() -> None:
        pool.hand_back(data)

    send(torch.cat([data[:n], scales[:n, :1]], dim=1), complete)
