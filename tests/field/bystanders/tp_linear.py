"""Tensor parallel linear layers with optional communication pool."""
from __future__ import annotations

from typing import List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CommPool:
    def __init__(self, max_tokens: int, dim: int, n: int = 2):
        self.max_tokens = max_tokens
        self._bufs = [torch.empty(max_tokens, dim) for _ in range(n)]
        self._busy = [False] * n

    def borrow(self) -> torch.Tensor:
        for i, busy in enumerate(self._busy):
            if not busy:
                self._busy[i] = True
                return self._bufs[i]
        raise RuntimeError("communication buffers exhausted")

    def give_back(self, buf: torch.Tensor) -> None:
        for i, b in enumerate(self._bufs):
            if b.data_ptr() == buf.data_ptr():
                self._busy[i] = False
                return
        raise ValueError("not one of ours")


class RowParallelLinear(nn.Module):
    def __init__(self, d_in: int, d_out: int, world: int, pool: Optional[CommPool] = None, reduce: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in // world))
        self.bias = nn.Parameter(torch.zeros(d_out))
        self.world = world
        self.pool = pool
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pool is not None:
            buf = self.pool.borrow()  # clean: near miss, given back under the same condition
            out = buf[: x.shape[0]]
            torch.matmul(x, self.weight.t(), out=out)
        else:
            buf = None
            out = F.linear(x, self.weight)
        if self.reduce and self.world > 1:
            dist.all_reduce(out)
        y = out + self.bias
        if self.pool is not None:
            self.pool.give_back(buf)
        return y

    def forward_chunked(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        assert self.pool is not None
        pieces: List[torch.Tensor] = []
        for part in x.split(chunk):
            buf = self.pool.borrow()  # clean: returned in each turn
            out = buf[: part.shape[0]]
            torch.matmul(part, self.weight.t(), out=out)
            if self.world > 1:
                dist.all_reduce(out)
            pieces.append(out.clone())
            self.pool.give_back(buf)
        return torch.cat(pieces)

    def forward_scaled(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        buf = self.pool.borrow() if self.pool is not None else None  # leak: given back only if reduce is set
        out = F.linear(x, self.weight)
        if buf is not None:
            out = buf[: x.shape[0]].copy_(out)
        out = out * scale
        if self.reduce:
            if self.world > 1:
                dist.all_reduce(out)
            if buf is not None:
                self.pool.give_back(buf)
        return out + self.bias


class ColumnParallelLinear(nn.Module):
    def __init__(self, d_in: int, d_out: int, world: int, pool: CommPool, gather: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out // world, d_in))
        self.world, self.pool, self.gather = world, pool, gather

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.borrow()  # clean: the caller gets it
        dist.all_gather_into_tensor(buf, self._local(x))
        return buf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gather:
            return self._local(x)
        full = self._gathered(x)  # clean: copied, then given back
        y = full.clone()
        self.pool.give_back(full)
        return y

    def logits(self, x: torch.Tensor, vocab: int) -> torch.Tensor:
        return self._gathered(x)[:, :vocab].float().clone()  # leak: the gathered buffer is copied and dropped

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        full = self._gathered(x)  # clean: near miss, indices are a fresh tensor and the buffer goes back
        best = full.argmax(dim=-1)
        self.pool.give_back(full)
        return best

    def top2(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        full = self._gathered(x)  # leak: single token inputs return early
        if x.shape[0] == 1:
            v, i = full.view(-1).topk(2)
            return v, i
        v, i = full.topk(2, dim=-1)
        self.pool.give_back(full)
        return v, i

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        full = self._gathered(x)  # leak: the mean-free copy replaces the buffer, which is never given back
        full = full - full.mean(dim=-1, keepdim=True)
        out = F.normalize(full, dim=-1)
        if out.shape[0] <= self.pool.max_tokens:
            return out
        return out[: self.pool.max_tokens]
