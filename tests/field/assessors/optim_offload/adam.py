"""CPU Adam on offloaded state."""
from __future__ import annotations

from typing import Iterable

import torch

from .arena import HostArena
from .swapper import StateSwapper


class OffloadedAdam:
    def __init__(self, params: Iterable[torch.nn.Parameter], arena: HostArena, lr: float = 1e-4) -> None:
        self.params = list(params)
        self.arena = arena
        self.swapper = StateSwapper(arena)
        self.lr = lr
        self.t = 0

    def step(self) -> int:
        self.t += 1
        updated = 0
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            n = p.numel()
            if not self.swapper.place(i, n):
                continue
            ext = self.arena.reserve(n)  # leak: a gradient with overflow continues to the next parameter without release
            if ext is None:
                break
            g = self.arena.view(ext, n)
            g.copy_(p.grad.view(-1))
            if not torch.isfinite(g).all():
                continue
            m, v = self.swapper.moments(i, n)
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            p.data.view(-1).add_((m / (v.sqrt() + 1e-8)).to(p.device), alpha=-self.lr)
            self.arena.release(ext)
            updated += 1
        return updated

    def grad_norm(self) -> float:
        total = 0.0
        for p in self.params:
            if p.grad is None:
                continue
            ext = self.arena.reserve(p.numel())  # clean: near miss, released before the test for overflow returns
            if ext is None:
                total += float(p.grad.float().pow(2).sum())
                continue
            g = self.arena.view(ext, p.numel())
            g.copy_(p.grad.view(-1))
            sq = float(g.pow_(2).sum())
            self.arena.release(ext)
            if sq == float("inf"):
                return sq
            total += sq
        return total ** 0.5

    def close(self) -> None:
        for i in range(len(self.params)):
            self.swapper.remove(i)
