"""The layer: route tokens, run experts, combine."""
from __future__ import annotations

import torch

from .buffers import BufferPool, TokenBuffer, packed, spill_packed
from .exchange import Exchange


class MoeLayer:
    def __init__(self, pool: BufferPool, ex: Exchange, experts: list[torch.nn.Module]) -> None:
        self.pool = pool
        self.ex = ex
        self.experts = experts
        self.saved: list[TokenBuffer] = []
        self.training = True

    def route(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1).long().abs() % len(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        dest = self.route(x)
        for e, expert in enumerate(self.experts):
            mask = dest == e
            buf = packed(self.pool, e, x[mask])  # clean: near miss, saved for backward or restocked
            if buf is None:
                continue
            y = expert(buf.data[: buf.filled])
            out[mask.nonzero().squeeze(1)[: buf.filled]] = y
            if self.training:
                self.saved.append(buf)
            else:
                self.pool.restock(buf)
        return out

    def backward(self, grad: torch.Tensor) -> list[torch.Tensor]:
        grads = [grad.mean() * b.data[: b.filled].mean(0) for b in self.saved]
        self.pool.restock_all(self.saved)
        return grads

    def load(self, x: torch.Tensor) -> dict[int, int]:
        """Tokens per expert, as the exchange would see them."""
        dest = self.route(x)
        counts: dict[int, int] = {}
        for e in range(len(self.experts)):
            bufs = spill_packed(self.pool, e, x[dest == e])  # leak: only the first of several is restocked
            counts[e] = sum(b.filled for b in bufs)
            if bufs:
                self.pool.restock(bufs[0])
        return counts

    def remote(self, x: torch.Tensor) -> list[torch.Tensor]:
        dest = self.route(x)
        bufs: list[TokenBuffer] = []
        for e in range(len(self.experts)):
            buf = packed(self.pool, e, x[dest == e])  # clean: near miss, the tickets of broadcast restock it
            if buf is not None:
                bufs.append(buf)
        return self.ex.broadcast(bufs)
