"""Split-KV flash decoding: partial accumulators, reduction, planning."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

try:
    import torch
except ImportError:
    torch = None


class Scratch:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.t = [0.0] * numel if torch is None else torch.zeros(numel)


class ScratchPool:
    def __init__(self) -> None:
        self._free: list[Scratch] = []
        self.reserved = 0

    def reserve(self, numel: int) -> Scratch:
        self.reserved += 1
        for i, s in enumerate(self._free):
            if s.numel >= numel:
                return self._free.pop(i)
        return Scratch(numel)

    def unreserve(self, s: Scratch) -> None:
        self.reserved -= 1
        self._free.append(s)


@dataclass
class Partial:
    acc: Scratch
    owned: bool

    def drop(self, pool: ScratchPool) -> None:
        if self.owned:
            pool.unreserve(self.acc)
            self.owned = False


class SplitPlan:
    """Plan, run, finish: one decode step of one layer."""

    def __init__(self, pool: ScratchPool, num_splits: int, causal: bool) -> None:
        self.pool = pool
        self.num_splits = num_splits
        self.causal = causal
        self.acc: Optional[Scratch] = None
        self.lse: Optional[Scratch] = None

    def begin(self, heads: int, dim: int) -> None:
        if self.num_splits > 1:
            self.acc = self.pool.reserve(self.num_splits * heads * dim)  # clean: near miss, end uses the same guard
            self.lse = self.pool.reserve(self.num_splits * heads)  # leak: end gives it back for causal plans only

    def end(self) -> None:
        if self.num_splits > 1:
            self.pool.unreserve(self.acc)
            self.acc = None
        if self.causal and self.num_splits > 1:
            self.pool.unreserve(self.lse)
            self.lse = None


class PagedSplitPlan:
    def __init__(self, pool: ScratchPool, pages: int) -> None:
        self.pool = pool
        self.pages = pages
        self.acc: Optional[Scratch] = None

    @property
    def split(self) -> bool:
        return self.pages > 8

    def begin(self, numel: int) -> None:
        if not self.split:
            return
        self.acc = self.pool.reserve(numel)  # clean: near miss, set exactly when end finds it

    def end(self) -> None:
        if self.acc is None:
            return
        acc, self.acc = self.acc, None
        self.pool.unreserve(acc)


def decode_layer(pool: ScratchPool, kernel: Callable[..., Any], q, splits: int, causal: bool = True):
    plan = SplitPlan(pool, splits, causal)
    plan.begin(len(q), 1)
    out = kernel(q, plan.acc, plan.lse)
    plan.end()
    return out


def decode_paged(pool: ScratchPool, kernel: Callable[..., Any], q, pages: int):
    plan = PagedSplitPlan(pool, pages)
    plan.begin(len(q))
    try:
        return kernel(q, plan.acc, None)
    finally:
        plan.end()


def reduce_partials(pool: ScratchPool, parts: list[Partial], out: Optional[Scratch] = None) -> float:
    own = out is None
    if own:
        out = pool.reserve(max(p.acc.numel for p in parts))  # clean: near miss, own remembers that it was reserved here
    total = 0.0
    for p in parts:
        total += float(p.acc.t[0])
        p.drop(pool)
    out.t[0] = total
    if own:
        pool.unreserve(out)
    return total


def reduce_captured(pool: ScratchPool, parts: list[Partial], out: Optional[Scratch], capturing: bool) -> float:
    own = out is None and not capturing
    if out is None:
        out = pool.reserve(parts[0].acc.numel)  # leak: own is false while capturing although it was reserved here
    total = sum(float(p.acc.t[0]) for p in parts)
    out.t[0] = total
    if own:
        pool.unreserve(out)
    return total


def make_partials(pool: ScratchPool, numel: int, n: int, first: Optional[Scratch] = None) -> list[Partial]:
    parts: list[Partial] = []
    for i in range(n):
        if i == 0 and first is not None:
            parts.append(Partial(first, owned=False))
        else:
            parts.append(Partial(pool.reserve(numel), owned=True))  # clean: the list is returned, drop gives back the owned ones
    return parts


def decode_split(pool: ScratchPool, kernel: Callable[[Scratch, int], None], numel: int, n: int) -> float:
    parts = make_partials(pool, numel, n)  # clean: reduce_partials drops each part
    for i, p in enumerate(parts):
        kernel(p.acc, i)
    return reduce_partials(pool, parts)


def decode_split_best(pool: ScratchPool, kernel: Callable[[Scratch, int], None], numel: int, n: int) -> Optional[float]:
    parts = make_partials(pool, numel, n)  # leak: only the best part is dropped
    best = None
    for i, p in enumerate(parts):
        kernel(p.acc, i)
        if best is None or p.acc.t[0] > best.acc.t[0]:
            best = p
    if best is None:
        return None
    score = float(best.acc.t[0])
    best.drop(pool)
    return score


def run_with_carry(pool: ScratchPool, kernel: Callable[[Scratch, Optional[Scratch]], bool], numel: int, steps: int) -> Optional[Scratch]:
    """Chain of accumulators; the surviving carry belongs to the caller."""
    carry: Optional[Scratch] = None
    for _ in range(steps):
        nxt = pool.reserve(numel)  # clean: near miss, given back on rejection, else it replaces a carry given back
        if not kernel(nxt, carry):
            pool.unreserve(nxt)
            continue
        if carry is not None:
            pool.unreserve(carry)
        carry = nxt
    return carry


def carry_value(pool: ScratchPool, kernel, numel: int, steps: int) -> float:
    carry = run_with_carry(pool, kernel, numel, steps)  # leak: the value is read, the carry dropped
    if carry is None:
        return 0.0
    return float(carry.t[0])


def warm_accumulator(pool: ScratchPool, numel: int, keep: bool) -> Optional[Scratch]:
    acc = pool.reserve(numel)  # clean: kept means returned, otherwise given back
    acc.t[0] = 0.0
    if keep:
        return acc
    pool.unreserve(acc)
    return None


def warmup(pool: ScratchPool, sizes: list[int], pinned: dict[int, Scratch]) -> None:
    for n in sizes:
        keep = n >= 4096
        acc = warm_accumulator(pool, n, keep)  # leak: a size listed twice overwrites the pinned entry
        if keep:
            pinned[n] = acc


def cooldown(pool: ScratchPool, pinned: dict[int, Scratch]) -> None:
    while pinned:
        _, acc = pinned.popitem()
        pool.unreserve(acc)
