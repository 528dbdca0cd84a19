"""Bucketed gradient reduction over a pool of flat communication buffers."""
from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist


class CommBufferPool:
    """Equal-sized flat device buffers. acquire() returns None when all are out."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self._free = deque(torch.empty(numel, dtype=dtype, device=device) for _ in range(count))

    def acquire(self) -> torch.Tensor | None:
        return self._free.popleft() if self._free else None

    def acquire_pair(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._free:
            return None
        first = self._free.popleft()  # leak: with one buffer left the body returns None and first is gone
        if not self._free:
            return None
        second = self._free.popleft()
        return first, second

    def release(self, buf: torch.Tensor) -> None:
        self._free.append(buf)


class BlockingPool:
    """Wrapper that waits for pending work when no buffer is free."""

    def __init__(self, inner: CommBufferPool, wait_one: Callable[[], bool]) -> None:
        self.inner = inner
        self.wait_one = wait_one

    def acquire(self) -> torch.Tensor:
        while True:
            buf = self.inner.acquire()  # clean: handed to the caller as soon as it is not None
            if buf is not None:
                return buf
            if not self.wait_one():
                raise RuntimeError("no buffer free and no work pending")

    def release(self, buf: torch.Tensor) -> None:
        self.inner.release(buf)


@dataclass
class Pending:
    work: Any
    flat: torch.Tensor
    params: list[torch.nn.Parameter]


def _chunks(params: list[torch.nn.Parameter], limit: int) -> Iterator[list[torch.nn.Parameter]]:
    group: list[torch.nn.Parameter] = []
    total = 0
    for p in params:
        if group and total + p.numel() > limit:
            yield group
            group, total = [], 0
        group.append(p)
        total += p.numel()
    if group:
        yield group


class BucketReducer:
    def __init__(self, pool: CommBufferPool, group: dist.ProcessGroup | None = None) -> None:
        self.raw = pool
        self.pool = BlockingPool(pool, self._wait_one)
        self.group = group
        self.pending: deque[Pending] = deque()
        self.residual: torch.Tensor | None = None
        self.ring: list[torch.Tensor] = []

    def _pack(self, params: list[torch.nn.Parameter]) -> torch.Tensor:
        flat = self.pool.acquire()  # clean: returned to the caller
        offset = 0
        for p in params:
            n = p.numel()
            if p.grad is None:
                flat[offset : offset + n].zero_()
            else:
                flat[offset : offset + n].copy_(p.grad.view(-1))
            offset += n
        return flat

    def _unpack(self, flat: torch.Tensor, params: list[torch.nn.Parameter]) -> None:
        offset = 0
        for p in params:
            if p.grad is not None:
                p.grad.view(-1).copy_(flat[offset : offset + p.numel()])
            offset += p.numel()

    def _wait_one(self) -> bool:
        if not self.pending:
            return False
        item = self.pending.popleft()
        item.work.wait()
        self._unpack(item.flat, item.params)
        self.pool.release(item.flat)
        return True

    def reduce(self, params: list[torch.nn.Parameter]) -> None:
        for bucket in _chunks(params, self.raw.numel):
            flat = self._pack(bucket)  # clean: moved into pending, released by _wait_one
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.pending.append(Pending(work, flat, bucket))

    def reduce_dense_only(self, params: list[torch.nn.Parameter]) -> None:
        for bucket in _chunks(params, self.raw.numel):
            flat = self._pack(bucket)  # leak: an all-zero bucket is skipped with its buffer still out
            if not flat.any():
                continue
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.pending.append(Pending(work, flat, bucket))

    def finish(self) -> None:
        while self._wait_one():
            pass

    def grad_norm(self, params: list[torch.nn.Parameter]) -> torch.Tensor:
        total = torch.zeros((), device=params[0].device)
        for bucket in _chunks(params, self.raw.numel):
            flat = self._pack(bucket)  # leak: used for its norm, then rebound in the next round without release
            total += flat[: sum(p.numel() for p in bucket)].float().square().sum()
        return total.sqrt()

    def broadcast(self, params: list[torch.nn.Parameter], src: int) -> None:
        flat: torch.Tensor | None = None
        for bucket in _chunks(params, self.raw.numel):
            if flat is None:
                flat = self.pool.acquire()  # clean: near miss, got once for all buckets and released after the loop
            offset = 0
            for p in bucket:
                flat[offset : offset + p.numel()].copy_(p.data.view(-1))
                offset += p.numel()
            dist.broadcast(flat, src, group=self.group)
            offset = 0
            for p in bucket:
                p.data.view(-1).copy_(flat[offset : offset + p.numel()])
                offset += p.numel()
        if flat is not None:
            self.pool.release(flat)

    def compress(self, grad: torch.Tensor, feedback: bool) -> torch.Tensor:
        """Sign compression; the error goes to the next call when feedback is on."""
        work = self.pool.acquire()  # leak: released only under `not feedback`, while with feedback just residual is replaced
        n = grad.numel()
        work[:n].copy_(grad.view(-1))
        if feedback and self.residual is not None:
            work[:n].add_(self.residual[:n])
        sign = work[:n].sign()
        if feedback:
            self.residual = work[:n] - sign
        else:
            self.pool.release(work)
        return sign

    def exchange(self, send: torch.Tensor, peer: int) -> torch.Tensor | None:
        pair = self.raw.acquire_pair()  # clean: near miss, None is returned at once, otherwise both halves are released
        if pair is None:
            return None
        out, inc = pair
        n = send.numel()
        out[:n].copy_(send.view(-1))
        reqs = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, inc, peer)])
        for r in reqs:
            r.wait()
        result = inc[:n].clone()
        for buf in pair:
            self.raw.release(buf)
        return result

    def open_ring(self, depth: int) -> bool:
        while len(self.ring) < depth:
            buf = self.raw.acquire()  # clean: near miss, the ring owns it and close_ring() releases whatever was collected
            if buf is None:
                self.close_ring()
                return False
            self.ring.append(buf)
        return True

    def shrink_ring(self, depth: int) -> None:
        for buf in itertools.islice(self.ring, depth, None):
            self.raw.release(buf)
        del self.ring[depth:]

    def close_ring(self) -> None:
        for buf in self.ring:
            self.raw.release(buf)
        self.ring.clear()

    def scatter_probe(self, world: int) -> float:
        buf = self.raw.acquire()  # leak: with an indivisible size the function returns before the release
        if buf is None:
            return 0.0
        if buf.numel() % world:
            return 0.0
        shard = torch.empty(buf.numel() // world, dtype=buf.dtype, device=buf.device)
        dist.reduce_scatter_tensor(shard, buf, group=self.group)
        self.raw.release(buf)
        return float(shard.float().mean())
