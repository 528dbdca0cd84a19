"""Gradient bucketing and asynchronous reduction for data-parallel training."""
from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Bucket:
    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.views: List[Tuple[nn.Parameter, int, int]] = []
        self.fill = 0

    def fits(self, n: int) -> bool:
        return self.fill + n <= self.flat.numel()

    def add(self, p: nn.Parameter) -> None:
        n = p.numel()
        self.flat[self.fill : self.fill + n].copy_(p.grad.reshape(-1))
        self.views.append((p, self.fill, n))
        self.fill += n

    def scatter(self) -> None:
        for p, start, n in self.views:
            p.grad.copy_(self.flat[start : start + n].view_as(p.grad))

    def clear(self) -> "Bucket":
        self.views = []
        self.fill = 0
        return self


class BucketPool:
    def __init__(self, numel: int, limit: int, device: torch.device) -> None:
        self.numel = numel
        self.device = device
        self._limit = threading.Semaphore(limit)
        self._rest: List[Bucket] = []

    def take(self) -> Bucket:
        self._limit.acquire()  # clean: near miss, the permit belongs to the bucket and put releases it
        if self._rest:
            return self._rest.pop().clear()  # clean: clear returns the same bucket, which is handed out
        return Bucket(torch.empty(self.numel, device=self.device))

    def try_take(self) -> Optional[Bucket]:
        if not self._limit.acquire(blocking=False):  # leak: with no bucket at rest the permit is kept though None is returned
            return None
        if not self._rest:
            return None
        return self._rest.pop().clear()  # clean: handed to the caller

    def put(self, bucket: Bucket) -> None:
        self._rest.append(bucket)
        self._limit.release()


class Reduction:
    """An all-reduce in flight, together with the bucket it works on."""

    def __init__(self, bucket: Bucket, work: Any, pool: BucketPool) -> None:
        self.bucket = bucket
        self.work = work
        self.pool = pool

    def finish(self, world: int) -> None:
        self.work.wait()
        self.bucket.flat[: self.bucket.fill].div_(world)
        self.bucket.scatter()
        self.pool.put(self.bucket)


class Reducer:
    def __init__(self, params: Iterable[nn.Parameter], pool: BucketPool, group=None) -> None:
        self.params = [p for p in params if p.requires_grad]
        self.pool = pool
        self.group = group
        self.world = dist.get_world_size(group)
        self._pending: List[Reduction] = []
        self._current: Optional[Bucket] = None

    def _launch(self, bucket: Bucket) -> None:
        work = dist.all_reduce(bucket.flat[: bucket.fill], group=self.group, async_op=True)
        self._pending.append(Reduction(bucket, work, self.pool))

    def reduce_all(self) -> None:
        bucket = self.pool.take()  # clean: near miss, either launched or put back at the end
        for p in self.params:
            if p.grad is None:
                continue
            if not bucket.fits(p.numel()):
                self._launch(bucket)
                bucket = self.pool.take()  # clean: near miss, the bucket it replaces was launched
            bucket.add(p)
        if bucket.fill:
            self._launch(bucket)
        else:
            self.pool.put(bucket)
        self.wait()

    def reduce_sparse(self, touched: Dict[int, bool]) -> int:
        count = 0
        bucket = self.pool.take()  # leak: with nothing touched it is neither launched nor put back
        for i, p in enumerate(self.params):
            if p.grad is None or not touched.get(i, False):
                continue
            bucket.add(p)
            count += 1
        if count:
            self._launch(bucket)
            self.wait()
        return count

    def wait(self) -> None:
        pending, self._pending = self._pending, []
        for reduction in pending:
            reduction.finish(self.world)

    def wait_ready(self) -> int:
        remaining: List[Reduction] = []
        for reduction in self._pending:
            if reduction.work.is_completed():
                reduction.finish(self.world)
            else:
                remaining.append(reduction)
        self._pending = remaining
        return len(remaining)

    def on_grad(self, p: nn.Parameter) -> None:
        if self._current is None:
            self._current = self.pool.take()  # clean: near miss, launched when full and flushed at the end of the step
        if not self._current.fits(p.numel()):
            self._launch(self._current)
            self._current = self.pool.take()  # clean: the former bucket is with its reduction
        self._current.add(p)

    def end_of_step(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._launch(current)
        self.wait()

    def install(self) -> List[Any]:
        handles = []
        for p in self.params:
            handles.append(p.register_post_accumulate_grad_hook(self.on_grad))  # clean: the handles go to the caller
        return handles


def average_scalars(pool: BucketPool, values: List[float], group=None) -> List[float]:
    bucket = pool.take()  # leak: the single-process shortcut returns before put
    if dist.get_world_size(group) == 1:
        return list(values)
    n = len(values)
    bucket.flat[:n].copy_(torch.tensor(values))
    dist.all_reduce(bucket.flat[:n], group=group)
    out = (bucket.flat[:n] / dist.get_world_size(group)).tolist()
    pool.put(bucket)
    return out


def overlap_or_block(reducer: Reducer, p: nn.Parameter) -> None:
    pool = reducer.pool
    bucket = pool.try_take()  # clean: near miss, one of the two takes is launched and finished by wait
    if bucket is None:
        reducer.wait()
        bucket = pool.take()  # clean: launched below
    bucket.add(p)
    reducer._launch(bucket)


def warm_up(pool: BucketPool, count: int) -> None:
    held = [pool.take() for _ in range(count)]  # leak: only the last of the buckets is put back
    for bucket in held:
        bucket.flat.zero_()
    pool.put(bucket)


def prime(pool: BucketPool, count: int) -> None:
    held = []
    for _ in range(count):
        held.append(pool.take())  # clean: near miss, all of them are popped again and put back
    while held:
        pool.put(held.pop())
