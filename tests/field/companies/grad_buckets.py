import math
from contextlib import contextmanager
from typing import Iterable, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn


class CommBufferPool:
    """Flat fp32/bf16 buffers shared by every bucket of a rank."""

    def __init__(self, numel: int, count: int, dtype=torch.float32, device="cpu"):
        self._stack: List[Tensor] = [torch.zeros(numel, dtype=dtype, device=device) for _ in range(count)]
        self.numel = numel

    def borrow(self) -> Tensor:
        if not self._stack:
            raise RuntimeError("communication buffers exhausted")
        return self._stack.pop()  # clean: the popped buffer is the result

    def give_back(self, buf: Tensor) -> None:
        self._stack.append(buf)

    @contextmanager
    def borrowed(self) -> Iterator[Tensor]:
        buf = self.borrow()  # clean: the finally gives it back
        try:
            yield buf
        finally:
            self.give_back(buf)


class Bucket:
    def __init__(self, params: List[nn.Parameter], pool: CommBufferPool):
        self.params = params
        self.pool = pool
        self.flat: Optional[Tensor] = None
        self.work = None

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.params)

    def pack(self) -> None:
        self.flat = self.pool.borrow()  # clean: unpack() gives the field back
        off = 0
        for p in self.params:
            n = p.numel()
            self.flat[off : off + n].copy_(p.grad.view(-1))
            off += n

    def launch(self, world_size: int) -> None:
        assert self.flat is not None
        self.flat.div_(world_size)
        self.work = dist.all_reduce(self.flat, async_op=True)

    def unpack(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.flat is None:
            return
        off = 0
        for p in self.params:
            n = p.numel()
            p.grad.copy_(self.flat[off : off + n].view_as(p))
            off += n
        self.pool.give_back(self.flat)
        self.flat = None


def reduce_inplace(pool: CommBufferPool, grad: Tensor, world: int) -> Tensor:
    buf = pool.borrow()  # clean: near miss, div_ works in place and the same buffer goes back
    view = buf[: grad.numel()]
    view.copy_(grad.view(-1))
    view.div_(world)
    out = view.clone().view_as(grad)
    pool.give_back(buf)
    return out


def reduce_scaled(pool: CommBufferPool, grad: Tensor, world: int) -> Tensor:
    buf = pool.borrow()  # leak: buf / world is another tensor, the borrowed one is lost
    buf[: grad.numel()].copy_(grad.view(-1))
    dist.all_reduce(buf)
    buf = buf / world
    out = buf[: grad.numel()].clone().view_as(grad)
    pool.give_back(buf)
    return out


def grad_norm(pool: CommBufferPool, params: Iterable[nn.Parameter]) -> float:
    total = 0.0
    for p in params:
        if p.grad is None:
            continue
        scratch = pool.borrow()  # leak: the non-finite return leaves with the buffer
        part = scratch[: p.numel()]
        torch.mul(p.grad.view(-1), p.grad.view(-1), out=part)
        value = float(part.sum())
        if not math.isfinite(value):
            return float("inf")
        total += value
        pool.give_back(scratch)
    return math.sqrt(total)


def grad_max(pool: CommBufferPool, params: Iterable[nn.Parameter]) -> float:
    best = 0.0
    for p in params:
        if p.grad is None:
            continue
        with pool.borrowed() as scratch:  # clean: near miss, the break leaves the with block
            part = scratch[: p.numel()]
            torch.abs(p.grad.view(-1), out=part)
            value = float(part.max())
            if not math.isfinite(value):
                break
        best = max(best, value)
    return best


def compress(pool: CommBufferPool, grad: Tensor) -> Tensor:
    buf = pool.borrow()  # clean: the caller owns the buffer
    buf.narrow(0, 0, grad.numel()).copy_(grad.view(-1))
    return buf


def average_all(pool: CommBufferPool, grads: List[Tensor]) -> List[Tensor]:
    outs = []
    for g in grads:
        outs.append(compress(pool, g)[: g.numel()].clone().view_as(g))  # leak: the pooled tensor is cloned and dropped
    return outs


class Reducer:
    def __init__(self, buckets: List[Bucket], pool: CommBufferPool, overlap: bool):
        self.buckets = buckets
        self.pool = pool
        self.overlap = overlap
        self.residual: Optional[Tensor] = None

    def keep_residual(self, err: Tensor) -> None:
        if self.residual is not None:
            self.pool.give_back(self.residual)
        self.residual = self.pool.borrow()  # clean: near miss, the old one goes back before the overwrite, close() does the last
        self.residual[: err.numel()].copy_(err.view(-1))

    def step(self, world: int) -> None:
        scale = None
        if self.overlap:
            scale = self.pool.borrow()  # clean: near miss, same flag guards the return
            scale.fill_(1.0 / world)
        for b in self.buckets:
            b.pack()
            b.launch(world)
            b.unpack()
        if self.overlap:
            self.pool.give_back(scale)

    def warmup(self, rounds: int) -> None:
        token = self.pool.borrow()  # leak: every round but the last is overwritten in the loop
        for _ in range(rounds):
            dist.all_reduce(token)
            token = self.pool.borrow()  # leak: in all rounds but the last it is overwritten by the next borrow
        self.pool.give_back(token)

    def close(self) -> None:
        if self.residual is not None:
            self.pool.give_back(self.residual)
            self.residual = None
