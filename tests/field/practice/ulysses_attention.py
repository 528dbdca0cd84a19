"""Sequence-parallel attention with head scatter / sequence gather."""
import math
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WorkspacePool:
    def __init__(self, numel: int, n: int, device="cpu"):
        self._slabs = [torch.empty(numel, device=device) for _ in range(n)]
        self._busy = {}

    def take(self, *shape: int) -> Tensor:
        need = math.prod(shape)
        for i, slab in enumerate(self._slabs):
            if slab.numel() >= need:
                del self._slabs[i]
                out = slab[:need].view(shape)
                self._busy[out.data_ptr()] = slab
                return out
        raise RuntimeError(f"no slab with {need} elements")

    def put_back(self, t: Tensor) -> None:
        self._slabs.append(self._busy.pop(t.data_ptr()))


class SeqAllToAll(nn.Module):
    def __init__(self, pool: Optional[WorkspacePool], group=None, world: int = 1):
        super().__init__()
        self.pool = pool
        self.group = group
        self.world = world

    def exchange(self, x: Tensor) -> Tensor:
        """Returns a pooled tensor if there is a pool."""
        if self.pool is None:
            out = torch.empty_like(x)
        else:
            out = self.pool.take(*x.shape)  # clean: handed to the caller
        torch.distributed.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    def done(self, x: Tensor) -> None:
        if self.pool is not None:
            self.pool.put_back(x)


class UlyssesAttention(nn.Module):
    def __init__(self, dim: int, heads: int, a2a: SeqAllToAll, causal: bool = True):
        super().__init__()
        self.dim, self.heads, self.causal = dim, heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.a2a = a2a
        self.sdpa = partial(F.scaled_dot_product_attention, is_causal=causal)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q_ = self.a2a.exchange(q)  # clean: near miss, done() puts back under the pool's own check
        k_ = self.a2a.exchange(k)  # clean: done() below
        v_ = self.a2a.exchange(v)  # leak: of the three only q_ and k_ are done
        o = self.sdpa(q_, k_, v_)
        self.a2a.done(q_)
        self.a2a.done(k_)
        o_ = self.a2a.exchange(o)  # clean: projected to a new tensor, then done
        y = self.proj(o_)
        self.a2a.done(o_)
        return y

    def forward_fused(self, x: Tensor) -> Tensor:
        qkv = self.a2a.exchange(self.qkv(x))  # clean: near miss, chunks are views and the whole goes back
        q, k, v = qkv.chunk(3, dim=-1)
        o = self.sdpa(q, k, v)
        self.a2a.done(qkv)
        return self.proj(o)

    def forward_masked(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.a2a.exchange(self.qkv(x))  # leak: replaced by the masked product, which is not pooled
        qkv = qkv * mask
        q, k, v = qkv.chunk(3, dim=-1)
        return self.proj(self.sdpa(q, k, v))

    def forward_masked_(self, x: Tensor, mask: Tensor) -> Tensor:
        qkv = self.a2a.exchange(self.qkv(x))  # clean: near miss, multiplied in place
        qkv *= mask
        q, k, v = qkv.chunk(3, dim=-1)
        o = self.sdpa(q, k, v)
        self.a2a.done(qkv)
        return self.proj(o)


class RingAttention(nn.Module):
    """Keys and values travel round the ring; one workspace per direction."""

    def __init__(self, pool: WorkspacePool, steps: int, use_pool: bool = True):
        super().__init__()
        self.pool = pool
        self.steps = steps
        self.use_pool = use_pool
        self.lse: Optional[Tensor] = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.pool.take(2, *k.shape) if self.use_pool else torch.empty(2, *k.shape)  # clean: near miss, put back under the same flag
        kv[0], kv[1] = k, v
        acc = torch.zeros_like(q)
        for _ in range(self.steps):
            acc += F.scaled_dot_product_attention(q, kv[0], kv[1])
        if self.use_pool:
            self.pool.put_back(kv)
        return acc / self.steps

    def forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, lens: list) -> Optional[Tensor]:
        kv = self.pool.take(2, *k.shape)  # leak: put back only when use_pool is set, but taken always
        kv[0], kv[1] = k, v
        outs = [F.scaled_dot_product_attention(q[:n], kv[0, :n], kv[1, :n]) for n in lens]
        if self.use_pool:
            self.pool.put_back(kv)
        return torch.cat(outs) if outs else None

    def begin(self, q: Tensor) -> None:
        self.end()
        self.lse = self.pool.take(*q.shape[:-1])  # clean: near miss, end() ran first, so nothing is overwritten
        self.lse.fill_(float("-inf"))

    def end(self) -> None:
        if self.lse is not None:
            self.pool.put_back(self.lse)
            self.lse = None

    def step(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.pool.take(q.shape[0], k.shape[0])  # leak: only the maxima leave, scores is never put back
        torch.matmul(q, k.t(), out=scores)
        if self.lse is not None:
            torch.logaddexp(self.lse, scores.logsumexp(-1), out=self.lse)
        return scores.max(-1).values

    def correct(self, o: Tensor, w: Tensor) -> Tensor:
        tmp = self.pool.take(*o.shape)  # leak: a shape mismatch raises with tmp taken
        if w.shape[0] != o.shape[0]:
            raise ValueError("weights do not match")
        torch.mul(o, w.unsqueeze(-1), out=tmp)
        res = tmp.sum(0)
        self.pool.put_back(tmp)
        return res
