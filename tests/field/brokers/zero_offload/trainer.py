from __future__ import annotations

import logging
from collections import deque

import torch

from .buffers import SwapBufferPool
from .params import Coordinator, GatheredParams, ReadOnlyParams, ShardedParam
from .swapper import Swapper

logger = logging.getLogger(__name__)


class OffloadTrainer:
    def __init__(self, params: list[ShardedParam], pool: SwapBufferPool) -> None:
        self.params = params
        self.pool = pool
        self.coord = Coordinator()
        self.swapper = Swapper(pool)
        self.ahead: deque[ShardedParam] = deque()

    def prefetch(self, start: int, depth: int) -> None:
        for p in self.params[start : start + depth]:
            self.coord.fetch(p)  # leak: use_next pops a param with hooks and skips it without a partition
            self.ahead.append(p)

    def use_next(self) -> torch.Tensor | None:
        while self.ahead:
            p = self.ahead.popleft()
            if p.hooks:
                continue
            assert p.full is not None
            out = p.full.sum()
            self.coord.partition(p)
            return out
        return None

    def grad_norm(self, grads: list[torch.Tensor]) -> float:
        buf = self.pool.request()  # clean: near miss, relinquished before the overflow is reported
        if buf is None:
            return float("nan")
        for g in grads:
            if not buf.append(g):
                break
        norm = float(buf.data[: buf.filled].norm())
        self.pool.relinquish(buf)
        if norm != norm:
            return 0.0
        return norm

    def step(self, p: ShardedParam, grad: torch.Tensor, lr: float) -> bool:
        buf = self.pool.request()  # leak: an overflow skips the step and the buffer is not relinquished
        if buf is None:
            return False
        buf.append(grad)
        if not bool(torch.isfinite(buf.data[: buf.filled]).all()):
            logger.warning("overflow in %s, step skipped", p.name)
            return False
        p.shard.sub_(buf.data[: p.shard.numel()], alpha=lr)
        self.pool.relinquish(buf)
        return self.swapper.write(p.name, p.shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.params:
            w = self.coord.fetch(p)  # clean: near miss, the continue for a frozen scale comes after the partition
            y = x * w.mean()
            self.coord.partition(p)
            if p.name.endswith("scale"):
                continue
            x = y
        return x

    def init_weights(self, rank: int) -> None:
        with GatheredParams(self.coord, self.params, modifier_rank=0, rank=rank):
            for p in self.params:
                if rank == 0 and p.full is not None:
                    p.full.normal_()

    def checksum(self) -> float:
        with ReadOnlyParams(self.coord, self.params) as fulls:
            return float(sum(float(f.sum()) for f in fulls))

    def train(self, xs: list[torch.Tensor], lr: float) -> float:
        total = 0.0
        for x in xs:
            y = self.forward(x)
            self.prefetch(0, 2)
            while (v := self.use_next()) is not None:
                total += float(v)
            for p in self.params:
                self.step(p, y.mean().expand(p.shard.numel()), lr)
            self.swapper.finish_writes()
        return total
