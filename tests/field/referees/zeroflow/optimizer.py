from __future__ import annotations

import torch

from .buffers import SwapBufferPool
from .swapper import ParamInfo, ParamSwapper


class SwappedAdam:
    def __init__(self, swapper: ParamSwapper, pool: SwapBufferPool, lr: float) -> None:
        self.swapper = swapper
        self.pool = pool
        self.lr = lr
        self.prefetched: list[ParamInfo] = []

    def step_one(self, p: ParamInfo, grad: torch.Tensor) -> bool:
        if not self.swapper.swap_in([p]):  # clean: near miss, released on both ways past the swap-in
            return False
        pair = self.pool.allocate_pair()  # leak: a non-finite gradient returns after releasing the parameter only
        if pair is None:
            self.swapper.release(p)
            return False
        if not bool(torch.isfinite(grad).all()):
            self.swapper.release(p)
            return False
        m, v = (self.pool.data(b, p.numel) for b in pair)
        m.copy_(grad)
        v.copy_(grad * grad)
        self.pool.data(p.buffer_id, p.numel).sub_(self.lr * m / (v.sqrt() + 1e-8))
        for b in pair:
            self.pool.free(b)
        self.swapper.release(p)
        return True

    def prefetch(self, params: list[ParamInfo]) -> None:
        if self.prefetched:
            for p in self.prefetched:
                self.swapper.release(p)
        self.prefetched = params if self.swapper.swap_in(params) else []  # clean: near miss, the earlier prefetch was released before it is overwritten

    def close(self) -> None:
        for p in self.prefetched:
            self.swapper.release(p)
        self.prefetched = []

    def norm(self, params: list[ParamInfo]) -> float:
        total = 0.0
        for p in params:
            if not self.swapper.swap_in([p]):  # leak: the early break upon overflow leaves the parameter swapped in
                break
            sq = float(self.pool.data(p.buffer_id, p.numel).pow(2).sum())
            if sq == float("inf"):
                break
            total += sq
            self.swapper.release(p)
        return total ** 0.5
