"""Gradient bucketing with reusable communication buffers."""
from __future__ import annotations

import logging
import math
import typing
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)


@dataclass
class BucketSpec:
    params: list[nn.Parameter]
    numel: int


class CommBufferPool:
    def __init__(self, sizes: typing.Sequence[int], dtype=torch.float32):
        self._bufs = [torch.empty(s, dtype=dtype) for s in sorted(sizes)]
        self._busy = torch.zeros(len(self._bufs), dtype=torch.bool)

    def claim(self, numel: int) -> torch.Tensor:
        for i, b in enumerate(self._bufs):
            if b.numel() >= numel and not self._busy[i]:
                self._busy[i] = True
                return b
        raise RuntimeError(f"no comm buffer for {numel}")

    def unclaim(self, buf: torch.Tensor) -> None:
        for i, b in enumerate(self._bufs):
            if b.data_ptr() == buf.data_ptr():
                self._busy[i] = False
                return
        raise KeyError("foreign buffer")


class Reducer:
    def __init__(self, buckets: list[BucketSpec], pool: CommBufferPool, world: int) -> None:
        self.buckets = buckets
        self.pool = pool
        self.world = world
        self.pending: list[tuple[typing.Any, torch.Tensor, BucketSpec]] = []

    @staticmethod
    def _pack(b: BucketSpec, buf: torch.Tensor) -> torch.Tensor:
        off = 0
        for p in b.params:
            n = p.numel()
            if p.grad is not None:
                buf[off:off + n].copy_(p.grad.view(-1))
            off += n
        return buf

    @staticmethod
    def _unpack(b: BucketSpec, buf: torch.Tensor) -> None:
        off = 0
        for p in b.params:
            n = p.numel()
            if p.grad is not None:
                p.grad.copy_(buf[off:off + n].view_as(p))
            off += n

    def reduce_sync(self, b: BucketSpec) -> None:
        buf = self.pool.claim(b.numel)  # clean: near miss, the division is in place
        self._pack(b, buf)
        dist.all_reduce(buf)
        buf /= self.world
        self._unpack(b, buf)
        self.pool.unclaim(buf)

    def reduce_mean(self, b: BucketSpec) -> None:
        buf = self.pool.claim(b.numel)  # leak: `buf / world` is a new tensor, the claimed one stays busy
        self._pack(b, buf)
        dist.all_reduce(buf)
        buf = buf / self.world
        self._unpack(b, buf)

    def launch(self) -> None:
        for b in self.buckets:
            if not any(p.grad is not None for p in b.params):
                continue
            buf = self.pool.claim(b.numel)  # clean: in pending, wait() unclaims every entry
            work = dist.all_reduce(self._pack(b, buf), async_op=True)
            self.pending.append((work, buf, b))

    def wait(self) -> None:
        for work, buf, b in self.pending:
            work.wait()
            buf.div_(self.world)
            self._unpack(b, buf)
            self.pool.unclaim(buf)
        self.pending.clear()

    def launch_nonzero(self) -> None:
        for b in self.buckets:
            buf = self._pack(b, self.pool.claim(b.numel))  # leak: buckets of all zeros are skipped with their buffer claimed
            if not buf[: b.numel].any():
                continue
            self.pending.append((dist.all_reduce(buf, async_op=True), buf, b))

    def grad_norm(self) -> float:
        total = 0.0
        for b in self.buckets:
            buf = self._pack(b, self.pool.claim(b.numel))  # clean: near miss, _pack returns the buffer it was given
            total += buf[: b.numel].pow(2).sum().item()
            self.pool.unclaim(buf)
        return math.sqrt(total)

    def check_overflow(self) -> bool:
        for b in self.buckets:
            buf = self.pool.claim(b.numel)  # leak: overflow returns at once with the bucket's buffer
            self._pack(b, buf)
            if not torch.isfinite(buf[: b.numel]).all():
                logger.warning("overflow")
                return True
            self.pool.unclaim(buf)
        return False

    def compress(self, b: BucketSpec) -> torch.Tensor:
        src = self.pool.claim(b.numel)  # clean: unclaimed here
        dst = self.pool.claim(b.numel)  # clean: handed to the caller
        self._pack(b, src)
        torch.sign(src, out=dst)
        self.pool.unclaim(src)
        return dst

    def sign_agreement(self, b: BucketSpec) -> float:
        signs = self.compress(b)  # leak: averaged and never unclaimed
        return signs[: b.numel].mean().item()

    def sign_step(self, b: BucketSpec, lr: float) -> None:
        signs = self.compress(b)  # clean: unclaimed after the unpack
        signs.mul_(lr)
        self._unpack(b, signs)
        self.pool.unclaim(signs)

    def gather(self, b: BucketSpec, rank: int) -> list[torch.Tensor] | None:
        mine = self._pack(b, self.pool.claim(b.numel))  # clean: near miss, unclaimed before either return
        parts = [self.pool.claim(b.numel) for _ in range(self.world)]  # leak: ranks other than 0 return None with the parts claimed
        dist.all_gather(parts, mine)
        self.pool.unclaim(mine)
        if rank != 0:
            return None
        out = [p.clone() for p in parts]
        for p in parts:
            self.pool.unclaim(p)
        return out

    def abandon(self) -> None:
        """Drop outstanding reductions (elastic restart)."""
        while self.pending:
            work, buf, _ = self.pending.pop()
            work.wait()
            self.pool.unclaim(buf)
