"""Column- and row-parallel linear layers whose outputs live in the arena."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist

from .arena import Span, SpillPool


@dataclass
class Pooled:
    """A tensor in a pool's span. The holder frees it."""

    pool: SpillPool
    span: Span
    shape: tuple[int, ...]

    @property
    def t(self) -> torch.Tensor:
        n = 1
        for s in self.shape:
            n *= s
        return self.pool.arena.slab[self.span.offset:self.span.offset + n].view(self.shape)

    def free(self) -> None:
        self.pool.stow(self.span)


def pooled(pool: SpillPool, *shape: int) -> Optional[Pooled]:
    span = pool.fetch()  # clean: handed on in the tensor
    return None if span is None else Pooled(pool, span, shape)


class ColumnLinear:
    def __init__(self, weight: torch.Tensor, pool: SpillPool) -> None:
        self.weight, self.pool = weight, pool

    def __call__(self, x: torch.Tensor) -> Pooled:
        out = pooled(self.pool, x.shape[0], self.weight.shape[0])  # clean: handed on to the caller
        torch.mm(x, self.weight.t(), out=out.t)
        return out


class RowLinear:
    def __init__(self, weight: torch.Tensor, bias: Optional[torch.Tensor], pool: SpillPool) -> None:
        self.weight, self.bias, self.pool = weight, bias, pool

    def __call__(self, x: torch.Tensor) -> Pooled:
        out = pooled(self.pool, x.shape[0], self.weight.shape[0])  # clean: handed on to the caller
        torch.mm(x, self.weight.t(), out=out.t)
        dist.all_reduce(out.t)
        if self.bias is not None:
            out.t.add_(self.bias)
        return out


class ParallelMLP:
    def __init__(self, up: ColumnLinear, down: RowLinear, pool: SpillPool) -> None:
        self.up, self.down, self.pool = up, down, pool

    def forward(self, x: torch.Tensor) -> Pooled:
        hidden = self.up(x)  # clean: freed when the second layer has read it
        hidden.t.relu_()
        out = self.down(hidden.t)  # clean: handed on to the caller
        hidden.free()
        return out

    def forward_residual(self, x: torch.Tensor) -> torch.Tensor:
        out = self.forward(x)  # leak: the sum is a new tensor and the pooled one is dropped
        return x + out.t

    def repeated(self, x: torch.Tensor, times: int) -> torch.Tensor:
        cur = self.forward(x)  # leak: rebound in the loop without being freed
        for _ in range(times - 1):
            cur = self.forward(cur.t)  # leak: each round but the last is rebound without being freed
        y = cur.t.clone()
        cur.free()
        return y

    def chained(self, x: torch.Tensor, times: int) -> torch.Tensor:
        cur = self.forward(x)  # clean: near miss, freed as the previous one or at the end
        for _ in range(times - 1):
            prev, cur = cur, self.forward(cur.t)  # clean: near miss, freed as the previous one or at the end
            prev.free()
        y = cur.t.clone()
        cur.free()
        return y


class GatedMLP:
    """Two up projections; the gate is optional."""

    def __init__(self, up: ColumnLinear, gate: Optional[ColumnLinear], down: RowLinear) -> None:
        self.up, self.gate, self.down = up, gate, down

    def forward(self, x: torch.Tensor) -> Pooled:
        h = self.up(x)  # clean: freed below
        g = self.gate(x) if self.gate is not None else None  # clean: near miss, freed where there is one
        if g is not None:
            h.t.mul_(g.t.sigmoid_())
        out = self.down(h.t)  # clean: handed on to the caller
        h.free()
        if g is not None:
            g.free()
        return out

    def sparsity(self, x: torch.Tensor, eps: float) -> float:
        h = self.up(x)  # clean: freed below
        share = float((h.t.abs() < eps).float().mean())
        if self.gate is not None:
            g = self.gate(x)  # leak: read for its mean only
            share *= float(g.t.sigmoid().mean())
        h.free()
        return share
