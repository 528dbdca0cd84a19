"""Buffer leases with several layers of wrappers: raw pool, metered pool, tagged leases, scopes."""
from __future__ import annotations

import logging
import time
import weakref
from types import TracebackType
from typing import ClassVar, Optional, Type

import torch

logger = logging.getLogger(__name__)


class RawPool:
    def __init__(self, n: int, numel: int) -> None:
        self._bufs = [torch.empty(numel) for _ in range(n)]

    def alloc(self) -> Optional[torch.Tensor]:
        return self._bufs.pop() if self._bufs else None  # clean: goes to the caller

    def dealloc(self, t: torch.Tensor) -> None:
        self._bufs.append(t)


class MeteredPool(RawPool):
    peak: ClassVar[int] = 0

    def __init__(self, n: int, numel: int, cap: int) -> None:
        super().__init__(n, numel)
        self.cap = cap
        self.now = 0

    def alloc(self) -> Optional[torch.Tensor]:
        t = super().alloc()  # leak: over the cap it returns None and the tensor is gone
        if t is None:
            return None
        if self.now >= self.cap:
            logger.warning("cap %d reached", self.cap)
            return None
        self.now += 1
        return t

    def dealloc(self, t: torch.Tensor) -> None:
        self.now -= 1
        super().dealloc(t)


class CappedPool(RawPool):
    def __init__(self, n: int, numel: int, cap: int) -> None:
        super().__init__(n, numel)
        self.cap = cap
        self.now = 0

    def alloc(self) -> Optional[torch.Tensor]:
        if self.now >= self.cap:
            return None
        t = super().alloc()  # clean: near miss, the cap is tested before it
        if t is not None:
            self.now += 1
        return t

    def dealloc(self, t: torch.Tensor) -> None:
        self.now -= 1
        super().dealloc(t)


class TaggedLease:
    """Takes a buffer when made; `close` or the end of a with block gives it back."""

    def __init__(self, pool: RawPool, tag: str) -> None:
        self.pool = pool
        self.tag = tag
        self.t0 = time.monotonic()
        self.tensor = pool.alloc()  # clean: close() deallocs

    def close(self) -> None:
        t, self.tensor = self.tensor, None
        if t is not None:
            self.pool.dealloc(t)

    def __enter__(self) -> TaggedLease:
        return self

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self.close()


class Scope:
    """Owns a group of leases."""

    def __init__(self, pool: RawPool) -> None:
        self.pool = pool
        self.leases: list[TaggedLease] = []

    def lease(self, tag: str) -> torch.Tensor:
        le = TaggedLease(self.pool, tag)  # clean: near miss, an empty lease is not kept, a full one is closed by end()
        if le.tensor is None:
            raise MemoryError(tag)
        self.leases.append(le)
        return le.tensor

    def end(self) -> None:
        while self.leases:
            self.leases.pop().close()


class Guard:
    def __init__(self, pool: RawPool) -> None:
        t = pool.alloc()  # clean: near miss, the finalizer deallocs it when the guard dies
        self.tensor = t
        if t is not None:
            weakref.finalize(self, pool.dealloc, t)


def dot(pool: RawPool, a: torch.Tensor, b: torch.Tensor) -> float:
    with TaggedLease(pool, "dot") as le:  # clean: with statement
        if le.tensor is None:
            return float(a @ b)
        tmp = le.tensor[: a.numel()]
        torch.mul(a, b, out=tmp)
        return float(tmp.sum())


def dot_open(pool: RawPool, a: torch.Tensor, b: torch.Tensor) -> float:
    le = TaggedLease(pool, "dot")  # leak: vectors of different length return nan before close
    if a.numel() != b.numel():
        return float("nan")
    if le.tensor is None:
        return float(a @ b)
    tmp = le.tensor[: a.numel()]
    torch.mul(a, b, out=tmp)
    s = float(tmp.sum())
    le.close()
    return s


def variance(pool: RawPool, x: torch.Tensor) -> float:
    sc = Scope(pool)
    d = sc.lease("diff")[: x.numel()]  # clean: scope is ended in finally
    try:
        torch.sub(x, x.mean(), out=d)
        return float(d.pow_(2).mean())
    finally:
        sc.end()


def skewness(pool: RawPool, x: torch.Tensor) -> float:
    sc = Scope(pool)
    d = sc.lease("diff")[: x.numel()]  # leak: zero deviation returns without end()
    torch.sub(x, x.mean(), out=d)
    sd = float(d.std())
    if sd == 0.0:
        return 0.0
    r = float((d / sd).pow(3).mean())
    sc.end()
    return r


def rows_mean(pool: RawPool, rows: list[torch.Tensor]) -> Optional[torch.Tensor]:
    acc = pool.alloc()  # clean: None-checked, dealloced after the clone
    if acc is None:
        return None
    acc.zero_()
    n = rows[0].numel()
    for r in rows:
        acc[:n] += r
    out = acc[:n].clone()
    out /= len(rows)
    pool.dealloc(acc)
    return out


def rows_max(pool: RawPool, rows: list[torch.Tensor]) -> Optional[torch.Tensor]:
    acc = pool.alloc()  # leak: torch.maximum without out= rebinds acc in the loop
    if acc is None:
        return None
    acc.fill_(float("-inf"))
    n = rows[0].numel()
    acc = acc[:n]
    for r in rows:
        acc = torch.maximum(acc, r)
    return acc


def try_both(first: RawPool, second: RawPool) -> Optional[tuple[torch.Tensor, RawPool]]:
    for p in (first, second):
        if (t := p.alloc()) is not None:  # clean: near miss, goes out together with its pool
            return t, p
    return None


def fill(first: RawPool, second: RawPool, value: float) -> bool:
    got = try_both(first, second)  # clean: dealloced to the pool that came with it
    if got is None:
        return False
    t, p = got
    t.fill_(value)
    p.dealloc(t)
    return True


def measure(first: RawPool, second: RawPool) -> int:
    got = try_both(first, second)  # leak: only the size of it is read
    return 0 if got is None else got[0].numel()
