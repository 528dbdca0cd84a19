"""Attention over the whole sequence with the heads split."""
from __future__ import annotations

from typing import List, Optional

import torch
import torch.distributed as dist

from .buffers import BufferSource, PingPongSource, RecyclingSource
from .comm import GatherHeads, Pending, ScatterHeads, drain


class UlyssesAttention:
    def __init__(self, source: BufferSource, group: dist.ProcessGroup, causal: bool = True):
        self.source = source
        self.scatter = ScatterHeads(source, group)
        self.gather = GatherHeads(source, group)
        self.causal = causal
        self._early: List[Pending] = []

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=self.causal).transpose(0, 1)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pendings = [self.scatter.begin(t) for t in (q, k, v)]  # clean: settled, unrented below
        full = [p.settle(self.source) for p in pendings]
        out = self._attend(*full)
        for p in pendings:
            self.source.unrent(p.recv)
        return self.gather.run_copy(out)

    def forward_shared_kv(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Multi-query variant: keys and values are one tensor."""
        pq = self.scatter.begin(q)  # clean: settled, the receive buffer unrented
        pkv = self.scatter.begin(kv)  # leak: the receive buffer of kv is not unrented
        full_q = pq.settle(self.source)
        full_kv = pkv.settle(self.source)
        out = self._attend(full_q, full_kv, full_kv)
        self.source.unrent(pq.recv)
        return self.gather.run_copy(out)

    def prefetch(self, tensors: List[torch.Tensor]) -> None:
        for t in tensors:
            self._early.append(self.scatter.begin(t))  # clean: near miss, use_early and reset deal with it

    def use_early(self) -> Optional[torch.Tensor]:
        if not self._early:
            return None
        pending = self._early.pop(0)
        out = pending.settle(self.source).clone()
        self.source.unrent(pending.recv)
        return out

    def reset(self) -> None:
        drain(self._early, self.source)

    def head_norms(self, x: torch.Tensor, only_large: float) -> List[float]:
        norms: List[float] = []
        for chunk in x.split(1024):
            pending = self.scatter.begin(chunk)  # leak: continue for a small chunk skips the receive buffer
            full = pending.settle(self.source)
            top = float(full.abs().amax())
            if top < only_large:
                continue
            norms.append(float(full.norm()))
            self.source.unrent(pending.recv)
        return norms


def alternate(source: BufferSource, xs: List[torch.Tensor]) -> torch.Tensor:
    pair = PingPongSource(source, xs[0].numel(), xs[0].dtype)  # clean: closed at the end
    total = torch.zeros_like(xs[0])
    for x in xs:
        buf = pair.flip()
        buf.copy_(x.reshape(-1))
        total += buf.view_as(x)
    pair.close()
    return total


def difference(source: BufferSource, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    pair = PingPongSource(source, a.numel(), a.dtype)  # leak: never closed
    pair.current().copy_(a.reshape(-1))
    out = pair.current().clone()
    pair.flip().copy_(b.reshape(-1))
    return out - pair.current()


def staged_sum(source: BufferSource, xs: List[torch.Tensor]) -> torch.Tensor:
    recycling = RecyclingSource(source)
    total = torch.zeros_like(xs[0])
    for x in xs:
        buf = recycling.rent(x.numel(), x.dtype)  # clean: near miss, unrented, flushed at the end
        buf.copy_(x.reshape(-1))
        total += buf.view_as(x)
        recycling.unrent(buf)
    recycling.flush()
    return total


def staged_max(source: BufferSource, xs: List[torch.Tensor]) -> float:
    recycling = RecyclingSource(source)
    best = float("-inf")
    for x in xs:
        buf = recycling.rent(x.numel(), x.dtype)  # leak: a NaN breaks out of the loop before unrent
        buf.copy_(x.reshape(-1))
        top = float(buf.max())
        if top != top:
            break
        best = max(best, top)
        recycling.unrent(buf)
    recycling.flush()
    return best
