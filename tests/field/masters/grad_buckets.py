"""Gradient buckets: gradients are copied into flat buffers that are reduced while backward goes on."""
from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.distributed as dist

log = logging.getLogger("ddp")


class Bucket:
    __slots__ = ("buf", "fill", "slots")

    def __init__(self, n, dtype, device):
        self.buf, self.fill, self.slots = torch.empty(n, dtype=dtype, device=device), 0, []

    @property
    def room(self):
        return self.buf.numel() - self.fill

    def push(self, g):
        n = g.numel()
        self.buf[self.fill:self.fill + n].copy_(g.reshape(-1))
        self.slots.append((g, self.fill, n))
        self.fill += n

    def scatter(self, scale=1.0):
        for g, off, n in self.slots:
            g.copy_(self.buf[off:off + n].view_as(g))
            if scale != 1.0:
                g.mul_(scale)


class BucketPool:
    """Flat buffers by size, unlimited, but what is recycled is used first."""

    def __init__(self, dtype=torch.bfloat16, device="cuda", quantum=1 << 20):
        self.dtype, self.device, self.quantum = dtype, device, quantum
        self._idle = defaultdict(list)
        self.made = self.out = 0

    def checkout(self, n) -> Bucket:
        n = -(-n // self.quantum) * self.quantum
        self.out += 1
        if self._idle[n]:
            return self._idle[n].pop()  # clean: returned
        self.made += 1
        return Bucket(n, self.dtype, self.device)

    def recycle(self, b: Bucket) -> None:
        b.fill = 0
        b.slots.clear()
        self.out -= 1
        self._idle[b.buf.numel()].append(b)

    def trim(self, keep=2):
        """After warm-up there is more of everything than is needed."""
        for n, lst in self._idle.items():
            while len(lst) > keep:
                b = lst.pop()  # clean: near miss, dropped on purpose, made is counted down and the memory goes with it
                b.buf = None
                self.made -= 1

    @contextmanager
    def flat(self, n):
        b = self.checkout(n)  # clean: recycled in the finally
        try:
            yield b
        finally:
            self.recycle(b)


class Reducer:
    def __init__(self, params, pool: BucketPool, group=None, cap=25 << 20):
        self.pool, self.group, self.cap = pool, group, cap
        self.world = dist.get_world_size(group)
        self.params = [p for p in params if p.requires_grad]
        self.cur = None
        self.inflight = []
        self.syncing = True
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._on_grad)

    def _on_grad(self, p):
        if not self.syncing:
            return
        n = p.grad.numel()
        if n > self.cap:
            self._alone(p.grad)
            return
        if self.cur is None:
            self.cur = self.pool.checkout(self.cap)  # clean: near miss, filled at once, so finalize() launches and recycles it
        if self.cur.room < n:
            self._launch(self.cur)
            self.cur = self.pool.checkout(self.cap)  # clean: the full one is in flight, this one gets the gradient below
        self.cur.push(p.grad)
        if self.cur.room == 0:
            self._launch(self.cur)
            self.cur = self.pool.checkout(self.cap)  # leak: if no gradient follows, finalize() drops it as it is empty

    def _alone(self, g):
        b = self.pool.checkout(g.numel())  # leak: a single rank returns without launching or recycling it
        b.push(g)
        if self.world == 1:
            return
        self._launch(b)

    def _launch(self, b: Bucket):
        work = dist.all_reduce(b.buf[:b.fill], group=self.group, async_op=True)
        self.inflight.append((work, b))

    def finalize(self):
        if self.cur is not None and self.cur.fill:
            self._launch(self.cur)
        self.cur = None
        for work, b in self.inflight:
            work.wait()
            b.scatter(1.0 / self.world)
            self.pool.recycle(b)
        self.inflight.clear()

    @contextmanager
    def no_sync(self):
        old, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = old


class PowerSgd:
    """Rank-r compression with error feedback."""

    def __init__(self, pool: BucketPool, group=None, rank=4):
        self.pool, self.group, self.rank = pool, group, rank
        self.residual = {}

    def _factor(self, n) -> Bucket:
        b = self.pool.checkout(n * self.rank)  # clean: returned
        b.fill = n * self.rank
        return b

    def _error(self, name, g):
        b = self.residual.get(name)
        if b is None or b.fill != g.numel():
            b = self.pool.checkout(g.numel())  # leak: after a reshape the old residual is overwritten and not recycled
            b.buf[:g.numel()].zero_()
            b.fill = g.numel()
            self.residual[name] = b
        return b.buf[:b.fill].view_as(g)

    def reduce(self, name, g):
        """Returns a future of the decompressed gradient."""
        err = self._error(name, g)
        m = g + err
        p = self._factor(g.shape[0])  # clean: near miss, the last callback recycles it
        q = self._factor(g.shape[1])  # clean: the same
        P, Q = p.buf[:p.fill].view(-1, self.rank), q.buf[:q.fill].view(-1, self.rank)
        Q.normal_()
        torch.matmul(m, Q, out=P)
        fut = dist.all_reduce(P, group=self.group, async_op=True).get_future()

        def second(_):
            P.copy_(torch.linalg.qr(P.float()).Q)
            torch.matmul(m.t(), P, out=Q)
            return dist.all_reduce(Q, group=self.group, async_op=True).get_future().wait()

        def last(_):
            out = P @ Q.t()
            err.copy_(m - out)
            self.pool.recycle(p)
            self.pool.recycle(q)
            return out

        return fut.then(second).then(last)

    def drop(self):
        while self.residual:
            self.pool.recycle(self.residual.popitem()[1])


def grad_norm(params, pool, group=None):
    grads = [p.grad for p in params if p.grad is not None]
    b = pool.checkout(sum(g.numel() for g in grads))  # leak: an overflow returns inf before the recycle
    for g in grads:
        b.push(g)
    sq = b.buf[:b.fill].float().square().sum()
    dist.all_reduce(sq, group=group)
    if not torch.isfinite(sq):
        log.warning("gradient overflow")
        return float("inf")
    pool.recycle(b)
    return sq.sqrt().item()


def broadcast(params, pool, src=0, group=None):
    with pool.flat(sum(p.numel() for p in params)) as b:  # clean: the context manager recycles
        for p in params:
            b.push(p.data)
        dist.broadcast(b.buf[:b.fill], src, group=group)
        b.scatter()


def _stage(pool, b: Bucket, group) -> Bucket:
    """One level of the hierarchy; consumes b and returns another bucket."""
    out = pool.checkout(b.fill)  # clean: returned
    out.buf[:b.fill].copy_(b.buf[:b.fill])
    out.fill, out.slots = b.fill, list(b.slots)
    dist.all_reduce(out.buf[:out.fill], group=group)
    pool.recycle(b)
    return out


def hierarchical(grads, pool, levels):
    b = pool.checkout(sum(g.numel() for g in grads))  # clean: near miss, consumed by the first stage, or recycled at the end
    for g in grads:
        b.push(g)
    for group in levels:
        b = _stage(pool, b, group)  # clean: near miss, the one it replaces was recycled inside
    b.scatter()
    pool.recycle(b)


def gather_shards(shard, pool, group=None) -> list[Bucket]:
    parts = []
    for _ in range(dist.get_world_size(group)):
        b = pool.checkout(shard.numel())  # clean: returned in the list
        b.fill = shard.numel()
        parts.append(b)
    dist.all_gather([b.buf[:b.fill] for b in parts], shard.to(pool.dtype), group=group)
    return parts


def consolidate(shards, pool, group=None):
    """Whole tensors on rank 0, nothing elsewhere."""
    whole = {}
    for name, shard in shards.items():
        parts = gather_shards(shard, pool, group)  # leak: every other rank goes on without recycling its parts
        if dist.get_rank(group) != 0:
            continue
        whole[name] = torch.cat([b.buf[:b.fill].cpu() for b in parts])
        for b in parts:
            pool.recycle(b)
    log.info("consolidated %d of %d, %d buckets out", len(whole), len(shards), pool.out)
    return whole
