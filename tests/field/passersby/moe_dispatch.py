"""Expert-parallel token dispatch.

Two modes: "pooled" borrows its buffers from a per-rank pool, "eager" allocates anew.
"""
from __future__ import annotations

import abc
import logging
from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


@dataclass
class DispatchConfig:
    num_experts: int
    top_k: int
    hidden: int
    mode: str = "pooled"
    capacity_factor: float = 1.25


class TokenBufferPool:
    def __init__(self, rows: int, hidden: int, count: int, dtype=torch.bfloat16) -> None:
        self.rows = rows
        self.storage = torch.zeros(count, rows, hidden, dtype=dtype)
        self.available = torch.ones(count, dtype=torch.bool)

    def borrow(self) -> torch.Tensor:
        idx = torch.nonzero(self.available)
        if idx.numel() == 0:
            raise RuntimeError("token buffers exhausted")
        i = int(idx[0])
        self.available[i] = False  # clean: the row is what the caller gets
        return self.storage[i]

    def give_back(self, buf: torch.Tensor) -> None:
        step = self.storage.stride(0)
        self.available[(buf.storage_offset()) // step] = True


class Dispatcher(abc.ABC):
    def __init__(self, cfg: DispatchConfig, pool: Optional[TokenBufferPool]) -> None:
        self.cfg = cfg
        self.pool = pool if cfg.mode == "pooled" else None

    @abc.abstractmethod
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ...

    def capacity(self, tokens: int) -> int:
        c = self.cfg
        return int(tokens * c.top_k / c.num_experts * c.capacity_factor) + 1


class CapacityDispatcher(Dispatcher):
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        cap = self.capacity(x.shape[0])
        if self.pool is not None:
            buf = self.pool.borrow()  # clean: near miss, the same guard gives it back below
        else:
            buf = x.new_zeros(self.cfg.num_experts * cap, self.cfg.hidden)
        used = min(buf.shape[0], ids.numel())
        buf[:used].copy_(x.repeat_interleave(self.cfg.top_k, dim=0)[:used])
        out = buf[:used].clone()
        if self.pool is not None:
            self.pool.give_back(buf)
        return out

    def combine(self, y: torch.Tensor, weights: torch.Tensor, tokens: int) -> torch.Tensor:
        pooled = self.pool is not None and tokens <= self.pool.rows
        acc = self.pool.borrow() if self.pool is not None else y.new_zeros(tokens, self.cfg.hidden)  # leak: more tokens than rows: taken, but not pooled, so not given back
        if not pooled:
            acc = y.new_zeros(tokens, self.cfg.hidden)
        acc[:tokens] = (y * weights.unsqueeze(-1)).view(tokens, self.cfg.top_k, -1).sum(1)
        res = acc[:tokens].clone()
        if pooled:
            self.pool.give_back(acc)
        return res


class SortedDispatcher(Dispatcher):
    def __init__(self, cfg: DispatchConfig, pool: Optional[TokenBufferPool]) -> None:
        super().__init__(cfg, pool)
        self._scratch: Optional[torch.Tensor] = None

    def begin(self) -> None:
        if self.cfg.mode == "pooled" and self.pool is not None and self._scratch is None:
            self._scratch = self.pool.borrow()  # clean: near miss, taken only when none is held, end() gives it back

    def end(self) -> None:
        if self._scratch is not None and self.pool is not None:
            self.pool.give_back(self._scratch)
            self._scratch = None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(ids.flatten(), stable=True)
        rows = x.repeat_interleave(self.cfg.top_k, dim=0)[order]
        if self._scratch is None:
            return rows
        self._scratch[: rows.shape[0]].copy_(rows)
        return self._scratch[: rows.shape[0]].clone()

    def split(self, x: torch.Tensor, counts: List[int]) -> List[torch.Tensor]:
        if self.pool is None:
            return list(x.split(counts))
        parts = []
        buf = self.pool.borrow()  # leak: an overflowing split returns the plain chunks and keeps the buffer
        if sum(counts) > self.pool.rows:
            return list(x.split(counts))
        buf[: x.shape[0]].copy_(x)
        for piece in buf[: x.shape[0]].split(counts):
            parts.append(piece.clone())
        self.pool.give_back(buf)
        return parts


def dispatch_with_aux(
    d: SortedDispatcher, pool: TokenBufferPool, x: torch.Tensor, logits: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    ids = logits.topk(d.cfg.top_k, dim=-1).indices
    tmp = pool.borrow()  # leak: normalize gives a new tensor, the buffer's name is lost with it
    tmp[: x.shape[0]].copy_(x)
    tmp = F.normalize(tmp[: x.shape[0]], dim=-1)
    aux = (tmp @ tmp.T).mean()
    return d.dispatch(x, ids), aux


def overlap(pool: TokenBufferPool, xs: List[torch.Tensor]) -> List[torch.Tensor]:
    cur = pool.borrow()  # clean: near miss, the two names swap, both are given back at the end
    nxt = pool.borrow()  # clean: near miss, the two names swap, both are given back at the end
    outs = []
    for x in xs:
        nxt[: x.shape[0]].copy_(x)
        cur, nxt = nxt, cur
        outs.append(cur[: x.shape[0]].float())
    pool.give_back(cur)
    pool.give_back(nxt)
    return outs


def double_buffer(pool: TokenBufferPool, xs: List[torch.Tensor]) -> List[torch.Tensor]:
    outs = []
    cur = pool.borrow()  # leak: replaced by nxt in the loop without being given back
    for x in xs:
        nxt = pool.borrow()  # leak: becomes cur and is replaced in the next round, only the last one is given back
        nxt[: x.shape[0]].copy_(x)
        outs.append(nxt[: x.shape[0]].float())
        cur = nxt
    pool.give_back(cur)
    return outs
