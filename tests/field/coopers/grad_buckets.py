"""Bucketed gradient all-reduce with recycled communication buffers."""
from __future__ import annotations

import math
from collections import defaultdict
from typing import Iterable, NamedTuple

import torch
import torch.distributed as dist


class Handle(NamedTuple):
    work: dist.Work
    credit: int


class CommBufferPool:
    """Flat fp32 buffers; sizes are rounded up so that they can be reused."""

    GRANULE = 1 << 16

    def __init__(self, device: torch.device, cap_numel: int) -> None:
        self.device = device
        self.cap = cap_numel
        self.outstanding = 0
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)

    def obtain(self, numel: int) -> torch.Tensor | None:
        size = math.ceil(numel / self.GRANULE) * self.GRANULE
        if self.outstanding + size > self.cap:
            return None
        self.outstanding += size
        if self._spare[size]:
            return self._spare[size].pop()
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def recycle(self, buf: torch.Tensor) -> None:
        self.outstanding -= buf.numel()
        self._spare[buf.numel()].append(buf)


class Credits:
    """Bound on collectives in flight."""

    def __init__(self, n: int) -> None:
        self._avail = list(range(n))

    def draw(self) -> int | None:
        return self._avail.pop() if self._avail else None

    def refund(self, c: int) -> None:
        self._avail.append(c)


class Bucket:
    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.numel = sum(p.numel() for p in params)
        self.flat: torch.Tensor | None = None
        self.handle: Handle | None = None
        self.owns_flat = False


class BucketReducer:
    def __init__(self, buckets: Iterable[Bucket], pool: CommBufferPool, credits: Credits, group=None) -> None:
        self.buckets = list(buckets)
        self.pool = pool
        self.credits = credits
        self.group = group
        self.error_feedback: dict[int, torch.Tensor] = {}

    def _pack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        pos = 0
        for p in bucket.params:
            if p.grad is None:
                flat[pos : pos + p.numel()].zero_()
            else:
                flat[pos : pos + p.numel()].copy_(p.grad.reshape(-1))
            pos += p.numel()

    def _unpack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        pos = 0
        for p in bucket.params:
            if p.grad is not None:
                p.grad.copy_(flat[pos : pos + p.numel()].view_as(p))
            pos += p.numel()

    def launch(self, bucket: Bucket, shared: torch.Tensor | None = None) -> bool:
        if bucket.handle is not None:
            return True
        credit = self.credits.draw()  # leak: no buffer for the bucket returns without a refund
        if credit is None:
            return False
        if shared is not None:
            flat = shared
            owns = False
        else:
            flat = self.pool.obtain(bucket.numel)  # clean: near miss, recycled in finish under owns_flat, which is True just here
            owns = True
        if flat is None:
            return False
        self._pack(bucket, flat)
        work = dist.all_reduce(flat[: bucket.numel], group=self.group, async_op=True)
        bucket.flat, bucket.owns_flat = flat, owns
        bucket.handle = Handle(work, credit)
        return True

    def finish(self, bucket: Bucket) -> None:
        if bucket.handle is None:
            return
        bucket.handle.work.wait()
        self.credits.refund(bucket.handle.credit)
        bucket.handle = None
        self._unpack(bucket, bucket.flat)
        if bucket.owns_flat:
            self.pool.recycle(bucket.flat)
        bucket.flat = None

    def step(self) -> None:
        pending: list[Bucket] = []
        for bucket in self.buckets:
            while not self.launch(bucket) and pending:
                self.finish(pending.pop(0))
            pending.append(bucket)
        for bucket in pending:
            self.finish(bucket)

    def reduce_scalar(self, value: float) -> float:
        buf = self.pool.obtain(1)  # clean: near miss, recycled after the value was read out
        if buf is None:
            return value
        buf[0] = value
        dist.all_reduce(buf[:1], group=self.group)
        out = buf[0].item()
        self.pool.recycle(buf)
        return out

    def grad_norm(self) -> float | None:
        total = 0.0
        for bucket in self.buckets:
            buf = self.pool.obtain(bucket.numel)  # leak: a non-finite gradient returns None and the buffer stays out
            if buf is None:
                continue
            self._pack(bucket, buf)
            sq = buf[: bucket.numel].square().sum().item()
            if not math.isfinite(sq):
                return None
            total += sq
            self.pool.recycle(buf)
        return math.sqrt(total)

    def has_overflow(self) -> bool:
        found = False
        for bucket in self.buckets:
            buf = self.pool.obtain(bucket.numel)  # clean: near miss, recycled before the break
            if buf is None:
                continue
            self._pack(bucket, buf)
            found = not torch.isfinite(buf[: bucket.numel]).all().item()
            self.pool.recycle(buf)
            if found:
                break
        return found

    def compress(self, idx: int, ratio: float) -> torch.Tensor | None:
        bucket = self.buckets[idx]
        residual = self.pool.obtain(bucket.numel)  # leak: each step overwrites the residual of the step before
        if residual is None:
            return None
        self._pack(bucket, residual)
        view = residual[: bucket.numel]
        if idx in self.error_feedback:
            view += self.error_feedback[idx][: bucket.numel]
        k = max(1, int(bucket.numel * ratio))
        top = view.abs().topk(k).indices
        values = view[top].clone()
        view[top] = 0.0
        self.error_feedback[idx] = residual
        return values

    def reset_feedback(self) -> None:
        for buf in self.error_feedback.values():
            self.pool.recycle(buf)
        self.error_feedback.clear()

    def barrier_with_credit(self) -> bool:
        credit = self.credits.draw()  # clean: near miss, refunded whether or not the barrier times out
        if credit is None:
            return False
        try:
            dist.barrier(group=self.group)
        except RuntimeError:
            return False
        finally:
            self.credits.refund(credit)
        return True
