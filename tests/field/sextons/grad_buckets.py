from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class CommBufferPool:
    def __init__(self, count: int, numel: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.numel = numel
        self._pool: deque[torch.Tensor] = deque(torch.empty(numel, dtype=dtype, device="cuda") for _ in range(count))
        self.misses = 0

    def fetch(self) -> torch.Tensor | None:
        if not self._pool:
            self.misses += 1
            return None
        return self._pool.popleft()

    def recycle(self, buf: torch.Tensor) -> None:
        self._pool.append(buf)

    def fetch_zeroed(self) -> torch.Tensor | None:
        buf = self.fetch()  # clean: near miss, one and the same buffer is returned after zeroing
        return None if buf is None else buf.zero_()


@dataclass
class Bucket:
    params: list[torch.nn.Parameter]
    buf: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    work: dist.Work | None = None
    filled: int = 0

    @property
    def complete(self) -> bool:
        return self.filled == len(self.params)


@dataclass
class Reducer:
    pool: CommBufferPool
    buckets: list[Bucket]
    group: dist.ProcessGroup | None = None
    error_feedback: bool = False
    _pending: deque[Bucket] = field(default_factory=deque)
    _norms: list[torch.Tensor] = field(default_factory=list)

    def _begin(self, b: Bucket) -> bool:
        if b.buf is not None:
            return True
        buf = self.pool.fetch_zeroed()  # clean: near miss, recycled when there is no residual, else by _finish
        if buf is None:
            return False
        if self.error_feedback and b.residual is None:
            residual = self.pool.fetch_zeroed()  # clean: kept in the bucket across steps, recycled by close
            if residual is None:
                self.pool.recycle(buf)
                return False
            b.residual = residual
        b.buf = buf
        b.filled = 0
        return True

    def mark_ready(self, b: Bucket, p: torch.nn.Parameter, offset: int) -> None:
        if not self._begin(b):
            dist.all_reduce(p.grad, group=self.group)
            return
        b.buf[offset : offset + p.numel()].copy_(p.grad.view(-1))
        b.filled += 1
        if b.complete:
            if b.residual is not None:
                b.buf.add_(b.residual)
            b.work = dist.all_reduce(b.buf, group=self.group, async_op=True)
            self._pending.append(b)

    def _finish(self, b: Bucket) -> None:
        b.work.wait()
        offset = 0
        for p in b.params:
            p.grad.view(-1).copy_(b.buf[offset : offset + p.numel()])
            offset += p.numel()
        self.pool.recycle(b.buf)
        b.buf = b.work = None
        b.filled = 0

    def finalize(self) -> None:
        while self._pending:
            self._finish(self._pending.popleft())
        for b in self.buckets:
            if b.buf is not None:
                self.pool.recycle(b.buf)
                b.buf = None
        self._norms.clear()

    def local_norm(self, tag: str) -> bool:
        buf = self.pool.fetch()  # leak: goes to _norms, which finalize clears without recycling
        if buf is None:
            return False
        buf[: len(self.buckets)] = torch.tensor([float(b.filled) for b in self.buckets])
        self._norms.append(buf)
        log.debug("norm %s", tag)
        return True

    def global_norm(self) -> float:
        total = self.pool.fetch_zeroed()  # leak: a non-finite norm is returned before the recycle
        if total is None:
            return float("nan")
        for b in self.buckets:
            for p in b.params:
                if p.grad is not None:
                    total[0] += p.grad.float().pow(2).sum()
        dist.all_reduce(total[:1], group=self.group)
        value = float(total[0]) ** 0.5
        if value != value or value == float("inf"):
            return value
        self.pool.recycle(total)
        return value

    def broadcast_params(self, src: int = 0) -> int:
        sent = 0
        for b in self.buckets:
            buf = self.pool.fetch()  # clean: near miss, recycled ahead of the continue as well
            if buf is None:
                break
            n = sum(p.numel() for p in b.params)
            if n > buf.numel():
                self.pool.recycle(buf)
                for p in b.params:
                    dist.broadcast(p.data, src, group=self.group)
                continue
            flat = buf[:n]
            torch.cat([p.data.view(-1) for p in b.params], out=flat)
            dist.broadcast(flat, src, group=self.group)
            self.pool.recycle(buf)
            sent += n
        return sent

    def all_gather(self, shard: torch.Tensor, world: int) -> torch.Tensor | None:
        parts: list[torch.Tensor] = []
        for _ in range(world):
            part = self.pool.fetch()  # leak: the parts collected so far are dropped when one is missing
            if part is None:
                return None
            parts.append(part)
        views = [p[: shard.numel()] for p in parts]
        dist.all_gather(views, shard, group=self.group)
        full = torch.cat(views)
        for part in parts:
            self.pool.recycle(part)
        return full

    def double_buffered(self, chunks: list[torch.Tensor]) -> None:
        prev: tuple[torch.Tensor, dist.Work, torch.Tensor] | None = None
        for chunk in chunks:
            cur = self.pool.fetch()  # clean: near miss, the one before is recycled one turn later, the last after the loop
            if cur is None:
                break
            view = cur[: chunk.numel()]
            view.copy_(chunk.view(-1))
            work = dist.all_reduce(view, group=self.group, async_op=True)
            if prev is not None:
                self._drain(prev)
            prev = (cur, work, chunk)
        if prev is not None:
            self._drain(prev)

    def _drain(self, item: tuple[torch.Tensor, dist.Work, torch.Tensor]) -> None:
        buf, work, dst = item
        work.wait()
        dst.view(-1).copy_(buf[: dst.numel()])
        self.pool.recycle(buf)

    def reset_residual(self, b: Bucket) -> None:
        if not self.error_feedback:
            return
        fresh = self.pool.fetch_zeroed()  # leak: the residual held before is replaced and not recycled
        if fresh is not None:
            b.residual = fresh

    def close(self) -> None:
        self.finalize()
        for b in self.buckets:
            if b.residual is not None:
                self.pool.recycle(b.residual)
                b.residual = None


def ping(pool: CommBufferPool, peer: int, rank: int) -> bool:
    buf = pool.fetch()  # clean: near miss, both branches come to the recycle
    if buf is None:
        return False
    if rank < peer:
        dist.send(buf[:1], peer)
        dist.recv(buf[:1], peer)
    else:
        dist.recv(buf[:1], peer)
        dist.send(buf[:1], peer)
    pool.recycle(buf)
    return True
