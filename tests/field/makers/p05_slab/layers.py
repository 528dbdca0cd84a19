from __future__ import annotations

from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from .cache import ActivationCache
from .slab import SlabAllocator


class FusedNormLinear(nn.Module):
    def __init__(self, dim: int, out: int, allocator: SlabAllocator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, dim))
        self.bias = nn.Parameter(torch.zeros(out))
        self.gain = nn.Parameter(torch.ones(dim))
        self.allocator = allocator

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
        h = self.allocator.alloc(x.numel())  # leak: the residual branch returns first
        tmp = self.allocator.tensor(h, *x.shape)
        torch.mul(x, x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(), out=tmp)
        tmp.mul_(self.gain)
        if residual is not None:
            return F.linear(tmp + residual, self.weight, self.bias)
        y = F.linear(tmp, self.weight, self.bias)
        self.allocator.release(h)
        return y


class FusedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int, allocator: SlabAllocator, cache: Optional[ActivationCache] = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(dim, hidden))
        self.down = nn.Parameter(torch.empty(hidden, dim))
        self.hidden = hidden
        self.allocator = allocator
        self.cache = cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        a = self.allocator.alloc(rows * self.hidden)  # clean: released below on both branches
        buf = self.allocator.tensor(a, rows, self.hidden)
        torch.mm(x, self.up, out=buf)
        if self.training and self.cache is not None:
            self.cache.store("mlp.pre", buf)
        y = torch.mm(F.gelu(buf), self.down)
        self.allocator.release(a)
        return y

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        pair = [self.allocator.alloc(rows * self.hidden) for _ in range(2)]  # leak: only the first handle is released
        a, g = (self.allocator.tensor(h, rows, self.hidden) for h in pair)
        torch.mm(x, self.up, out=a)
        torch.mm(gate, self.up, out=g)
        y = torch.mm(a * g.sigmoid(), self.down)
        self.allocator.release(pair[0])
        return y

    def calibrate(self, samples: list[torch.Tensor]) -> float:
        peak = 0.0
        for x in samples:
            h = self.allocator.alloc(x.shape[0] * self.hidden)  # leak: an overflowing sample breaks out with the handle
            t = self.allocator.tensor(h, x.shape[0], self.hidden)
            torch.mm(x, self.up, out=t)
            top = t.abs().max().item()
            if top == float("inf"):
                break
            peak = max(peak, top)
            self.allocator.release(h)
        return peak
