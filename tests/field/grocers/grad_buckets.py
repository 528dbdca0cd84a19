"""Gradient buckets: communication buffers, in-flight reductions, residuals."""
from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class CommBufferPool:
    """Registered flat buffers. acquire() raises when the limit is reached."""

    def __init__(self, numel: int, limit: int, device: str = "cuda"):
        self.numel = numel
        self.limit = limit
        self.device = device
        self._free: List[torch.Tensor] = []
        self._made = 0

    def acquire(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        if self._made == self.limit:
            raise RuntimeError("communication buffers exhausted")
        self._made += 1
        return torch.empty(self.numel, device=self.device)

    def release(self, buf: torch.Tensor) -> None:
        self._free.append(buf)


class Bucket:
    def __init__(self, index: int, params: List[torch.nn.Parameter]):
        self.index = index
        self.params = params
        self.buf: Optional[torch.Tensor] = None
        self.pending = len(params)


class Reducer:
    """Fills buckets as gradients arrive and reduces full ones."""

    def __init__(self, pool: CommBufferPool, buckets: List[Bucket]):
        self.pool = pool
        self.buckets = buckets
        self.inflight: List[tuple] = []

    def on_grad(self, bucket: Bucket, offset: int, grad: torch.Tensor) -> None:
        if bucket.buf is None:
            bucket.buf = self.pool.acquire()  # leak: finalize resets buckets that stayed partial without releasing
        bucket.buf[offset : offset + grad.numel()].copy_(grad.view(-1))
        bucket.pending -= 1
        if bucket.pending == 0:
            work = dist.all_reduce(bucket.buf, async_op=True)
            self.inflight.append((bucket, work))

    def finalize(self) -> None:
        for bucket, work in self.inflight:
            work.wait()
            self._scatter(bucket)
            self.pool.release(bucket.buf)
        self.inflight.clear()
        for bucket in self.buckets:
            bucket.buf = None
            bucket.pending = len(bucket.params)

    def _scatter(self, bucket: Bucket) -> None:
        at = 0
        for p in bucket.params:
            p.grad.copy_(bucket.buf[at : at + p.numel()].view_as(p))
            at += p.numel()


class AccumulatingReducer:
    def __init__(self, pool: CommBufferPool):
        self.pool = pool
        self.sums: Dict[int, torch.Tensor] = {}

    def add(self, index: int, flat: torch.Tensor) -> None:
        acc = self.sums.get(index)
        if acc is None:
            acc = self.sums[index] = self.pool.acquire()  # clean: near miss, absent key, reduce and zero_grad release
            acc.zero_()
        acc[: flat.numel()].add_(flat)

    def reduce(self, index: int) -> torch.Tensor:
        acc = self.sums.pop(index)
        dist.all_reduce(acc)
        out = acc.clone()
        self.pool.release(acc)
        return out

    def zero_grad(self) -> None:
        for index in list(self.sums):
            self.pool.release(self.sums.pop(index))


class ErrorFeedback:
    """Compression residual of every bucket."""

    def __init__(self, pool: CommBufferPool, ratio: float):
        self.pool = pool
        self.ratio = ratio
        self.residual: Dict[int, torch.Tensor] = {}

    def compress(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        old = self.residual.get(index)
        if old is not None:
            flat = flat + old[: flat.numel()]
        k = max(1, int(flat.numel() * self.ratio))
        top = flat.abs().topk(k).indices
        rest = self.pool.acquire()  # leak: replaces the residual of the same bucket each step (by meaning)
        rest[: flat.numel()].copy_(flat)
        rest[top] = 0
        self.residual[index] = rest
        return flat[top]

    def close(self) -> None:
        for buf in self.residual.values():
            self.pool.release(buf)
        self.residual.clear()


class ShadowResidual(ErrorFeedback):
    def compress(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        nxt = self.pool.acquire()  # clean: near miss, the replaced residual is released below
        nxt[: flat.numel()].copy_(flat)
        old = self.residual.get(index)
        self.residual[index] = nxt
        if old is not None:
            nxt.add_(old)
            self.pool.release(old)
        return flat.sign()


class OverlapScatter:
    """Reduce-scatter with a done callback which gives the input back."""

    def __init__(self, pool: CommBufferPool, world: int):
        self.pool = pool
        self.world = world

    def launch(self, shard: torch.Tensor, flat: torch.Tensor, on_done: Optional[Callable[[], None]] = None):
        inp = self.pool.acquire()  # leak: the future callback that releases is only set when on_done is given
        inp[: flat.numel()].copy_(flat)
        work = dist.reduce_scatter_tensor(shard, inp, async_op=True)
        if on_done is not None:
            def done(_fut):
                self.pool.release(inp)
                on_done()

            work.get_future().add_done_callback(done)
        return work

    def launch_many(self, shards: List[torch.Tensor], flats: List[torch.Tensor]) -> None:
        works = []
        for shard, flat in zip(shards, flats):
            inp = self.pool.acquire()  # clean: carried in works with its handle, released in the loop below
            inp[: flat.numel()].copy_(flat)
            works.append((dist.reduce_scatter_tensor(shard, inp, async_op=True), inp))
        for work, inp in works:
            work.wait()
            self.pool.release(inp)


class HierarchicalReducer:
    def __init__(self, pool: CommBufferPool, intra, inter):
        self.pool = pool
        self.intra = intra
        self.inter = inter

    def reduce(self, flat: torch.Tensor, retries: int = 2) -> torch.Tensor:
        for attempt in range(retries + 1):
            work = self.pool.acquire()  # leak: the except branch goes on to the next attempt with a new one
            work[: flat.numel()].copy_(flat)
            try:
                dist.all_reduce(work, group=self.intra)
                dist.all_reduce(work, group=self.inter)
            except dist.DistBackendError as exc:
                log.warning("attempt %d: %s", attempt, exc)
                continue
            out = work[: flat.numel()].clone()
            self.pool.release(work)
            return out
        raise RuntimeError("reduction failed")

    def reduce_safe(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        work = self.pool.acquire()  # clean: finally
        try:
            work[: flat.numel()].copy_(flat)
            dist.all_reduce(work, group=self.intra)
            return work[: flat.numel()].clone()
        except dist.DistBackendError:
            return None
        finally:
            self.pool.release(work)


class NormTracker:
    """Holds the last reduced bucket for the clip decision."""

    def __init__(self, pool: CommBufferPool, limit: float):
        self.pool = pool
        self.limit = limit
        self.kept: Optional[torch.Tensor] = None

    def observe(self, flat: torch.Tensor) -> None:
        buf = self.pool.acquire()  # clean: near miss, the branch swaps it with the kept one, the loser is released
        buf[: flat.numel()].copy_(flat)
        if self.kept is None or buf.norm() > self.kept.norm():
            buf, self.kept = self.kept, buf
        if buf is not None:
            self.pool.release(buf)

    def clip(self, grads: List[torch.Tensor]) -> bool:
        if self.kept is None:
            return False
        kept, self.kept = self.kept, None
        norm = kept.norm()
        self.pool.release(kept)
        if norm <= self.limit:
            return False
        for g in grads:
            g.mul_(self.limit / norm)
        return True
