"""Gradient bucketing for data parallel training with gradient accumulation."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist


@dataclass(eq=False)
class Bucket:
    flat: torch.Tensor
    fill: int = 0
    members: List[torch.nn.Parameter] = field(default_factory=list)

    def room(self, numel: int) -> bool:
        return self.fill + numel <= self.flat.numel()

    def add(self, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        count = param.grad.numel()
        self.flat[self.fill : self.fill + count].copy_(param.grad.view(-1))
        self.fill += count
        self.members.append(param)


class BucketPool:
    """Grows on demand, never above `limit` buckets."""

    def __init__(self, numel: int, limit: int) -> None:
        self.numel = numel
        self.limit = limit
        self._made = 0
        self._idle: List[Bucket] = []

    def obtain(self) -> Bucket:
        if not self._idle:
            if self._made == self.limit:
                raise RuntimeError("bucket pool exhausted")
            self._made += 1
            self._idle.append(Bucket(torch.zeros(self.numel)))
        bucket = self._idle.pop()  # clean: returned to the caller
        bucket.fill = 0
        bucket.members.clear()
        return bucket

    def recycle(self, bucket: Bucket) -> None:
        self._idle.append(bucket)


class GradientReducer:
    """Packs gradients into buckets and reduces them as they fill."""

    def __init__(self, pool: BucketPool, compress: bool) -> None:
        self.pool = pool
        self.compress = compress
        self.sync = True
        self._open: Optional[Bucket] = None
        self._scratch: Optional[Bucket] = None
        self._shadow: Optional[Bucket] = None
        self._pending: List[Tuple[dist.Work, Bucket]] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        previous, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = previous

    def begin_step(self) -> None:
        if self.compress:
            self._scratch = self.pool.obtain()  # clean: near miss, compress is set once and end_step has the same guard
        self._shadow = self.pool.obtain()  # leak: a step that ends under no_sync keeps it and the next begin_step overwrites it

    def end_step(self) -> None:
        self.flush()
        if self.compress and self._scratch is not None:
            self.pool.recycle(self._scratch)
            self._scratch = None
        if self.sync and self._shadow is not None:
            self.pool.recycle(self._shadow)
            self._shadow = None

    def on_grad(self, param: torch.nn.Parameter) -> None:
        if not self.sync or param.grad is None:
            return
        count = param.grad.numel()
        if self._open is not None and not self._open.room(count):
            self._launch()
        if self._open is None:
            self._open = self.pool.obtain()  # clean: near miss, filled only when empty; _launch moves it to _pending, flush recycles it
        self._open.add(param)

    def _launch(self) -> None:
        bucket, self._open = self._open, None
        if bucket is not None:
            work = dist.all_reduce(bucket.flat[: bucket.fill], async_op=True)
            self._pending.append((work, bucket))

    def flush(self) -> None:
        self._launch()
        for work, bucket in self._pending:
            work.wait()
            offset = 0
            for param in bucket.members:
                count = param.grad.numel()
                param.grad.copy_(bucket.flat[offset : offset + count].view_as(param.grad))
                offset += count
            self.pool.recycle(bucket)
        self._pending.clear()

    def reduce_one(self, param: torch.nn.Parameter) -> bool:
        """Reduce a parameter that skipped bucketing."""
        bucket = self.pool.obtain()  # leak: a gradient too big for the bucket returns without the recycle
        if param.grad is None or not bucket.room(param.grad.numel()):
            if param.grad is not None:
                dist.all_reduce(param.grad)
                return True
            self.pool.recycle(bucket)
            return False
        bucket.add(param)
        dist.all_reduce(bucket.flat[: bucket.fill])
        param.grad.copy_(bucket.flat[: bucket.fill].view_as(param.grad))
        self.pool.recycle(bucket)
        return True

    def local_norm(self, params: List[torch.nn.Parameter]) -> float:
        bucket = self.pool.obtain()  # leak: a non-finite gradient returns before the recycle
        for param in params:
            if param.grad is None or not bucket.room(param.grad.numel()):
                continue
            if not torch.isfinite(param.grad).all():
                return float("inf")
            bucket.add(param)
        norm = bucket.flat[: bucket.fill].norm().item()
        self.pool.recycle(bucket)
        return norm


class ExpertReducer:
    """One open bucket per expert group."""

    def __init__(self, pool: BucketPool) -> None:
        self.pool = pool
        self.groups: Dict[str, Bucket] = {}

    def on_grad(self, group: str, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        bucket = self.groups.get(group)
        if bucket is None or not bucket.room(param.grad.numel()):
            bucket = self.pool.obtain()  # leak: a full bucket still in the group's entry is overwritten
            self.groups[group] = bucket
        bucket.add(param)

    def on_grad_eager(self, group: str, param: torch.nn.Parameter) -> None:
        assert param.grad is not None
        bucket = self.groups.get(group)
        if bucket is not None and not bucket.room(param.grad.numel()):
            self._reduce(self.groups.pop(group))
            bucket = None
        if bucket is None:
            bucket = self.pool.obtain()  # clean: near miss, a full bucket was popped and reduced before
            self.groups[group] = bucket
        bucket.add(param)

    def _reduce(self, bucket: Bucket) -> None:
        dist.all_reduce(bucket.flat[: bucket.fill])
        self.pool.recycle(bucket)

    def finish(self) -> None:
        while self.groups:
            self._reduce(self.groups.popitem()[1])
