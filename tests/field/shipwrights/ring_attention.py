"""Ring attention over a context-parallel group.

K and V shards travel round the ring in staging tensors.  The staging tensors
are cached by shape so that the steady state does not touch the allocator.
"""
from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn


class StagingPool:
    """Idle tensors by (shape, dtype); grows up to ``max_bytes``."""

    def __init__(self, device: torch.device, max_bytes: int = 1 << 30) -> None:
        self.device = device
        self.max_bytes = max_bytes
        self.bytes = 0
        self._idle: dict[tuple, list[torch.Tensor]] = defaultdict(list)

    def checkout(self, shape, dtype) -> torch.Tensor | None:
        key = (tuple(shape), dtype)
        bucket = self._idle[key]
        if bucket:
            return bucket.pop()  # clean: returned to the caller
        nbytes = math.prod(key[0]) * torch.empty((), dtype=dtype).element_size()
        if self.bytes + nbytes > self.max_bytes:
            return None
        self.bytes += nbytes
        return torch.empty(key[0], dtype=dtype, device=self.device)

    def checkin(self, t: torch.Tensor) -> None:
        self._idle[(tuple(t.shape), t.dtype)].append(t)

    def demand(self, shape, dtype) -> torch.Tensor:
        t = self.checkout(shape, dtype)  # clean: the raise is only for None
        if t is None:
            raise MemoryError(f"staging pool is full ({self.bytes} bytes)")
        return t

    def checkout_pair(self, a: torch.Tensor, b: torch.Tensor):
        first = self.checkout(a.shape, a.dtype)  # leak: still out when the second checkout is None
        if first is None:
            return None
        second = self.checkout(b.shape, b.dtype)  # clean: returned with the first
        if second is None:
            return None
        return first, second


class RingExchange:
    """One send/recv pair per hop.  Receive tensors wait in ``_pending``."""

    def __init__(self, group, pool: StagingPool) -> None:
        self.group = group
        self.pool = pool
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._pending: list[tuple] = []

    def post(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        rk = self.pool.checkout(k.shape, k.dtype)  # clean: near miss, in _pending until arrive() or abort()
        if rk is None:
            return False
        rv = self.pool.checkout(v.shape, v.dtype)  # clean: near miss, in _pending until arrive() or abort()
        if rv is None:
            self.pool.checkin(rk)
            return False
        nxt, prv = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ops = [
            dist.P2POp(dist.isend, k, nxt, self.group),
            dist.P2POp(dist.isend, v, nxt, self.group),
            dist.P2POp(dist.irecv, rk, prv, self.group),
            dist.P2POp(dist.irecv, rv, prv, self.group),
        ]
        self._pending.append((dist.batch_isend_irecv(ops), rk, rv))
        return True

    def arrive(self):
        reqs, rk, rv = self._pending.pop(0)
        for r in reqs:
            r.wait()
        return rk, rv

    def abort(self) -> None:
        while self._pending:
            reqs, rk, rv = self._pending.pop()
            for r in reqs:
                r.wait()
            self.pool.checkin(rk)
            self.pool.checkin(rv)


class RingAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ring: RingExchange, pool: StagingPool) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.ring = ring
        self.pool = pool
        self.track_max = False
        self.running_max: torch.Tensor | None = None

    def _split(self, x):
        b, n, d = x.shape
        return (t.view(b, n, self.heads, -1).transpose(1, 2).contiguous() for t in self.qkv(x).chunk(3, dim=-1))

    def _scores(self, q, k) -> torch.Tensor:
        s = self.pool.demand((*q.shape[:3], k.shape[2]), q.dtype)  # clean: handed to the caller
        torch.matmul(q, k.transpose(-1, -2), out=s)
        return s.mul_(self.scale)

    def _block(self, q, k, v):
        s = self._scores(q, k)  # clean: checked in once the probabilities exist
        m = s.amax(dim=-1, keepdim=True)
        p = torch.exp(s - m)
        self.pool.checkin(s)
        denom = p.sum(dim=-1, keepdim=True)
        return torch.matmul(p, v) / denom, (m + denom.log()).squeeze(-1)

    @torch.no_grad()
    def entropy(self, x) -> torch.Tensor:
        """Mean attention entropy of the local shard, for the dashboard."""
        q, k, _ = self._split(x)
        p = torch.softmax(self._scores(q, k), dim=-1)  # leak: softmax makes a copy and the pooled scores are dropped
        return -(p * p.clamp_min(1e-9).log()).sum(-1).mean()

    def _local(self, q, k, v):
        out, _ = self._block(q, k, v)
        return out

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self._split(x)
        acc = self.pool.checkout(q.shape, torch.float32)  # leak: not checked in when there is no room for lse
        if acc is None:
            return self._join(self._local(q, k, v))
        lse = self.pool.checkout(q.shape[:-1], torch.float32)  # clean: checked in before the projection
        if lse is None:
            return self._join(self._local(q, k, v))
        acc.zero_()
        lse.fill_(float("-inf"))

        owned = False
        for hop in range(self.ring.size):
            last = hop + 1 == self.ring.size
            if not last and not self.ring.post(k, v):
                self.pool.checkin(acc)
                self.pool.checkin(lse)
                if owned:
                    self.pool.checkin(k)
                    self.pool.checkin(v)
                raise MemoryError("ring hop could not be staged")
            out, l = self._block(q, k, v)
            new = torch.logaddexp(lse, l.float())
            acc.mul_((lse - new).exp().unsqueeze(-1)).add_(out * (l - new).exp().unsqueeze(-1))
            lse.copy_(new)
            if owned:
                self.pool.checkin(k)
                self.pool.checkin(v)
            if not last:
                k, v = self.ring.arrive()  # clean: near miss, owned is set and the next hop checks both in
                owned = True
        result = acc.to(x.dtype)
        self.pool.checkin(acc)
        self.pool.checkin(lse)
        return self._join(result)

    def forward_masked(self, x: torch.Tensor, live: list[bool]) -> torch.Tensor:
        """Only the hops whose document is live contribute."""
        q, k, v = self._split(x)
        total = self._local(q, k, v).float()
        for hop in range(1, self.ring.size):
            if not self.ring.post(k, v):
                break
            k, v = self.ring.arrive()  # leak: the tensors of one hop are rebound by the next, only the last are checked in
            if not live[hop]:
                continue
            total += self._local(q, k, v)
        if self.ring.size > 1:
            self.pool.checkin(k)
            self.pool.checkin(v)
        return self._join(total.to(x.dtype))

    def observe(self, q, k) -> None:
        if not self.track_max:
            return
        peak = self.pool.demand(q.shape[:-1], q.dtype)  # leak: the previous running_max is overwritten
        peak.copy_((q * k).sum(-1))
        self.running_max = peak

    def reset_stats(self) -> None:
        if self.running_max is not None:
            self.pool.checkin(self.running_max)
            self.running_max = None

    def _join(self, t: torch.Tensor) -> torch.Tensor:
        b, h, n, d = t.shape
        return self.proj(t.transpose(1, 2).reshape(b, n, h * d))
