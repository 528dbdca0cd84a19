"""Gradient buckets that are reduced over the slow fabric through pinned staging memory.

The inter-pod link has no GPUDirect, so every bucket is copied to a pinned host
buffer, reduced with gloo and copied back on the reducer's own stream.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class StagingPool:
    """A fixed number of equally sized pinned buffers."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype = torch.float32):
        self._cond = threading.Condition()
        self._idle = deque(torch.empty(numel, dtype=dtype, pin_memory=True) for _ in range(count))
        self.numel = numel
        self.high_water = 0
        self._count = count

    def borrow(self, timeout: float | None = None):
        with self._cond:
            if not self._cond.wait_for(lambda: len(self._idle) > 0, timeout):
                return None
            buf = self._idle.popleft()  # clean: returned to the borrower
            self.high_water = max(self.high_water, self._count - len(self._idle))
            return buf

    def restore(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()

    @contextlib.contextmanager
    def staged(self):
        buf = self.borrow()  # clean: restored in finally around the yield
        try:
            yield buf
        finally:
            self.restore(buf)


@dataclass
class Bucket:
    index: int
    flat: torch.Tensor
    params: list = field(default_factory=list)
    pending: int = 0
    sparse: bool = False

    @property
    def numel(self) -> int:
        return self.flat.numel()

    @property
    def ready(self) -> bool:
        return self.pending == 0


class BucketReducer:
    def __init__(self, pool: StagingPool, group, compress: bool = False):
        self.pool = pool
        self.group = group
        self.compress = compress
        self.world = dist.get_world_size(group)
        self.stream = torch.cuda.Stream()
        self._inflight: deque = deque()

    # -- synchronous reductions -------------------------------------------------

    def reduce_now(self, bucket: Bucket) -> bool:
        stage = self.pool.borrow(timeout=30.0)  # leak: not restored when the bucket is empty
        if stage is None:
            log.warning("no staging buffer for bucket %d", bucket.index)
            return False
        if bucket.numel == 0:
            return True
        view = stage[: bucket.numel]
        view.copy_(bucket.flat)
        dist.all_reduce(view, group=self.group)
        bucket.flat.copy_(view.div_(self.world))
        self.pool.restore(stage)
        return True

    def broadcast_flat(self, flat: torch.Tensor, src: int) -> None:
        stage = self.pool.borrow()  # clean: restored in finally
        try:
            view = stage[: flat.numel()]
            if dist.get_rank(self.group) == src:
                view.copy_(flat)
            dist.broadcast(view, src, group=self.group)
            flat.copy_(view)
        finally:
            self.pool.restore(stage)

    def reduce_sparse(self, bucket: Bucket, indices: torch.Tensor, values: torch.Tensor) -> bool:
        vals = self.pool.borrow(timeout=5.0)  # leak: lost when the index buffer cannot be borrowed
        if vals is None:
            return False
        idx = self.pool.borrow(timeout=5.0)  # clean: restored with vals below
        if idx is None:
            log.warning("sparse bucket %d falls back to dense", bucket.index)
            return False
        vals[: values.numel()].copy_(values.reshape(-1))
        idx[: indices.numel()].copy_(indices.reshape(-1))
        dist.all_reduce(vals, group=self.group)
        dist.all_reduce(idx, group=self.group)
        self.pool.restore(idx)
        self.pool.restore(vals)
        return True

    def reduce_pair(self, a: Bucket, b: Bucket) -> bool:
        left = self.pool.borrow(timeout=5.0)  # clean: near miss, restored when the second borrow fails
        if left is None:
            return False
        right = self.pool.borrow(timeout=5.0)  # clean: restored after the pair is reduced
        if right is None:
            self.pool.restore(left)
            return False
        for bucket, stage in ((a, left), (b, right)):
            view = stage[: bucket.numel]
            view.copy_(bucket.flat)
            dist.all_reduce(view, group=self.group)
            bucket.flat.copy_(view)
        self.pool.restore(left)
        self.pool.restore(right)
        return True

    def grad_norms(self, buckets: list[Bucket]) -> list[float]:
        norms = []
        for bucket in buckets:
            stage = self.pool.borrow()  # leak: `continue` skips the restore for buckets that are not ready
            if not bucket.ready:
                norms.append(float("nan"))
                continue
            view = stage[: bucket.numel]
            view.copy_(bucket.flat)
            norms.append(view.norm().item())
            self.pool.restore(stage)
        return norms

    def max_abs(self, buckets: list[Bucket]) -> float:
        worst = 0.0
        for bucket in buckets:
            if not bucket.ready:
                continue
            with self.pool.staged() as stage:  # clean: context manager
                view = stage[: bucket.numel]
                view.copy_(bucket.flat)
                worst = max(worst, view.abs().max().item())
        return worst

    # -- reductions in flight ---------------------------------------------------

    def launch(self, bucket: Bucket) -> None:
        stage = self.pool.borrow()  # clean: queued in _inflight, which drain() empties
        view = stage[: bucket.numel]
        view.copy_(bucket.flat, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        work = dist.all_reduce(view, group=self.group, async_op=True)
        self._inflight.append((bucket, stage, work))

    def drain(self) -> None:
        while self._inflight:
            bucket, stage, work = self._inflight.popleft()
            work.wait()
            bucket.flat.copy_(stage[: bucket.numel])
            self.pool.restore(stage)

    def launch_with_retry(self, bucket: Bucket, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            stage = self.pool.borrow()  # leak: the next attempt borrows again after a RuntimeError
            view = stage[: bucket.numel]
            view.copy_(bucket.flat)
            try:
                dist.all_reduce(view, group=self.group)
            except RuntimeError as exc:
                log.warning("bucket %d attempt %d: %s", bucket.index, attempt, exc)
                continue
            bucket.flat.copy_(view)
            self.pool.restore(stage)
            return True
        return False

    # -- compression ------------------------------------------------------------

    def compress_reduce(self, bucket: Bucket) -> None:
        scratch = None
        if self.compress:
            scratch = self.pool.borrow()  # leak: the restore also asks for world > 1
            scratch[: bucket.numel].copy_(bucket.flat.half())
        src = bucket.flat if scratch is None else scratch[: bucket.numel]
        dist.all_reduce(src, group=self.group)
        if self.compress and self.world > 1:
            bucket.flat.copy_(src)
            self.pool.restore(scratch)

    def accumulate(self, bucket: Bucket, into: torch.Tensor) -> None:
        scratch = None
        if bucket.flat.dtype is not torch.float32:
            scratch = self.pool.borrow()  # clean: near miss, restored exactly when it was borrowed
            scratch[: bucket.numel].copy_(bucket.flat)
        src = scratch[: bucket.numel] if scratch is not None else bucket.flat
        into.add_(src.to(into.device))
        if scratch is not None:
            self.pool.restore(scratch)
