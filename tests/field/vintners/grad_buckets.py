"""Gradient bucketing with overlapped all-reduce, in the manner of DDP's reducer."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Dict, List, Optional

import torch
import torch.distributed as dist


class BucketPool:
    """Flat communication buffers, each of `cap` elements."""

    def __init__(self, cap: int, n: int, dtype: torch.dtype, device: str) -> None:
        self.cap = cap
        self._shelf = [torch.zeros(cap, dtype=dtype, device=device) for _ in range(n)]
        self._cv = threading.Condition()

    def lease(self, timeout: Optional[float] = None) -> Optional[torch.Tensor]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._shelf, timeout):
                return None
            return self._shelf.pop()

    def restore(self, flat: torch.Tensor) -> None:
        with self._cv:
            self._shelf.append(flat)
            self._cv.notify()


class InflightLimiter:
    """Counting limiter of collectives on the wire."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._cv = threading.Condition()

    def enter(self) -> None:
        with self._cv:
            while self._n == 0:
                self._cv.wait()
            self._n -= 1

    def try_enter(self) -> bool:
        with self._cv:
            if self._n == 0:
                return False
            self._n -= 1
            return True

    def leave(self) -> None:
        with self._cv:
            self._n += 1
            self._cv.notify()


@dataclass
class Bucket:
    params: List[torch.nn.Parameter]
    flat: Optional[torch.Tensor] = None
    ready: int = 0
    work: Optional[object] = None
    offsets: List[int] = field(default_factory=list)


class Reducer:
    def __init__(self, params, pool: BucketPool, limiter: InflightLimiter, group=None) -> None:
        self.pool = pool
        self.limiter = limiter
        self.group = group
        self.buckets = self._layout(list(params))
        self._owner: Dict[torch.nn.Parameter, Bucket] = {}
        for b in self.buckets:
            for p in b.params:
                self._owner[p] = b
                p.register_post_accumulate_grad_hook(self.on_grad)

    def _layout(self, params: List[torch.nn.Parameter]) -> List[Bucket]:
        out: List[Bucket] = [Bucket([])]
        used = 0
        for p in reversed(params):
            if used + p.numel() > self.pool.cap and out[-1].params:
                out.append(Bucket([]))
                used = 0
            out[-1].params.append(p)
            out[-1].offsets.append(used)
            used += p.numel()
        return out

    # ---- hot path -------------------------------------------------------------------------

    def on_grad(self, p: torch.nn.Parameter) -> None:
        b = self._owner[p]
        if b.flat is None:
            b.flat = self.pool.lease()  # clean: near miss, finalize() restores it
        off = b.offsets[b.params.index(p)]
        b.flat[off: off + p.numel()].copy_(p.grad.view(-1))
        b.ready += 1
        if b.ready == len(b.params):
            self._launch(b)

    def _launch(self, b: Bucket) -> None:
        self.limiter.enter()  # clean: near miss, finalize() leaves once for each bucket with work
        b.work = dist.all_reduce(b.flat, group=self.group, async_op=True)

    def finalize(self) -> None:
        world = dist.get_world_size(self.group)
        for b in self.buckets:
            if b.work is not None:
                b.work.wait()
                self.limiter.leave()
                for p, off in zip(b.params, b.offsets):
                    p.grad.view(-1).copy_(b.flat[off: off + p.numel()]).div_(world)
            if b.flat is not None:
                self.pool.restore(b.flat)
            b.flat, b.work, b.ready = None, None, 0


class CompressedReducer(Reducer):
    """Adds a half-precision copy of each bucket, sent in its place."""

    def __init__(self, params, pool, limiter, half_pool: BucketPool, group=None) -> None:
        super().__init__(params, pool, limiter, group)
        self.half_pool = half_pool
        self._halves: Dict[int, torch.Tensor] = {}
        self._errors: Dict[int, torch.Tensor] = {}

    def _launch(self, b: Bucket) -> None:
        key = id(b)
        half = self.half_pool.lease()  # clean: finalize() restores each of the halves
        half.copy_(b.flat)
        self._halves[key] = half
        err = self.pool.lease()  # leak: finalize() clears the residual table without restoring
        torch.sub(b.flat, half.to(b.flat.dtype), out=err)
        self._errors[key] = err
        self.limiter.enter()  # clean: the base finalize() leaves for it
        b.work = dist.all_reduce(half, group=self.group, async_op=True)

    def finalize(self) -> None:
        for b in self.buckets:
            half = self._halves.pop(id(b), None)
            if half is None:
                continue
            b.work.wait()
            b.flat.copy_(half)
            b.flat.add_(self._errors[id(b)])
            self.half_pool.restore(half)
        self._errors.clear()
        super().finalize()


# ---- callbacks on futures --------------------------------------------------------------------


def _settle(pool: BucketPool, limiter: InflightLimiter, flat: torch.Tensor, fut) -> torch.Tensor:
    mean = fut.value()[0].clone()
    limiter.leave()
    pool.restore(flat)
    return mean


def reduce_later(t: torch.Tensor, pool: BucketPool, limiter: InflightLimiter, group):
    flat = pool.lease()  # clean: near miss, the callback restores it
    limiter.enter()  # clean: near miss, the callback leaves
    flat[: t.numel()].copy_(t.view(-1))
    fut = dist.all_reduce(flat, group=group, async_op=True).get_future()
    return fut.then(partial(_settle, pool, limiter, flat))


def reduce_later_scaled(t: torch.Tensor, scale: float, pool: BucketPool, limiter: InflightLimiter, group):
    flat = pool.lease()  # clean: near miss, the inner function restores it
    limiter.enter()  # leak: the callback restores the buffer, nothing leaves the limiter
    flat[: t.numel()].copy_(t.view(-1)).mul_(scale)
    fut = dist.all_reduce(flat, group=group, async_op=True).get_future()

    def done(f) -> torch.Tensor:
        value = f.value()[0].clone().div_(scale)
        pool.restore(flat)
        return value

    return fut.then(done)


def try_reduce(t: torch.Tensor, pool: BucketPool, limiter: InflightLimiter, group) -> bool:
    """Reduce in place if both resources are there at once; the caller tries again otherwise."""
    if not limiter.try_enter():  # leak: the return for want of a buffer does not leave
        return False
    flat = pool.lease(timeout=0.05)  # clean: None-checked, restored below
    if flat is None:
        return False
    flat[: t.numel()].copy_(t.view(-1))
    dist.all_reduce(flat, group=group)
    t.view(-1).copy_(flat[: t.numel()])
    pool.restore(flat)
    limiter.leave()
    return True


def reduce_with_retry(t: torch.Tensor, pool: BucketPool, limiter: InflightLimiter, group, tries: int) -> bool:
    for _ in range(tries):
        flat = pool.lease(timeout=0.05)  # clean: restored before the next try and at the end
        if flat is None:
            continue
        if not limiter.try_enter():  # clean: a refused entry holds nothing, the other one is left below
            pool.restore(flat)
            continue
        flat[: t.numel()].copy_(t.view(-1))
        dist.all_reduce(flat, group=group)
        t.view(-1).copy_(flat[: t.numel()])
        limiter.leave()
        pool.restore(flat)
        return True
    return False


def reduce_norms(groups: Dict[str, List[torch.Tensor]], pool: BucketPool, pg) -> Dict[str, float]:
    """Global gradient norm by parameter group; all groups share one buffer."""
    flat = pool.lease()  # leak: the early return for an empty dict keeps it
    if not groups:
        return {}
    flat.zero_()
    names = sorted(groups)
    for i, name in enumerate(names):
        flat[i] = sum(float(g.norm() ** 2) for g in groups[name])
    dist.all_reduce(flat[: len(names)], group=pg)
    out = {name: float(flat[i]) ** 0.5 for i, name in enumerate(names)}
    pool.restore(flat)
    return out


def bucketize(grads: List[torch.Tensor], pool: BucketPool) -> List[torch.Tensor]:
    """Pack gradients densely; every buffer in the returned list belongs to the caller."""
    out: List[torch.Tensor] = []
    cur = pool.lease()  # clean: near miss, appended to the result in the loop or after it
    used = 0
    for g in grads:
        if used + g.numel() > pool.cap:
            out.append(cur)
            cur = pool.lease()  # clean: near miss, the full one is already in the list
            used = 0
        cur[used: used + g.numel()].copy_(g.view(-1))
        used += g.numel()
    out.append(cur)
    return out


def dry_run(grads: List[torch.Tensor], pool: BucketPool, visit: Callable[[torch.Tensor], None]) -> int:
    packed = bucketize(grads, pool)  # clean: each of them is restored
    for flat in packed:
        visit(flat)
        pool.restore(flat)
    return len(packed)


def count_overflow(grads: List[torch.Tensor], pool: BucketPool) -> int:
    bad = 0
    for flat in bucketize(grads, pool):  # leak: clean buckets are skipped before the restore
        if torch.isfinite(flat).all():
            continue
        bad += 1
        pool.restore(flat)
    return bad


def sizes_by_dtype(params) -> Dict[torch.dtype, int]:
    table: Dict[torch.dtype, int] = defaultdict(int)
    for p in params:
        table[p.dtype] += p.numel()
    return dict(table)
