"""Ring attention with pooled KV landing buffers."""
from __future__ import annotations

import math
from collections import defaultdict
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist


class Landing(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


class LandingPool:
    """KV pairs cached by shape; grows on demand and never blocks."""

    def __init__(self, device, dtype=torch.bfloat16):
        self.device = device
        self.dtype = dtype
        self._by_shape = defaultdict(list)
        self.rented = 0

    def rent(self, shape) -> Landing:
        shape = tuple(shape)
        self.rented += 1
        if self._by_shape[shape]:
            return self._by_shape[shape].pop()
        k = torch.empty(shape, device=self.device, dtype=self.dtype)
        return Landing(k, torch.empty_like(k))

    def ret(self, pair: Landing) -> None:
        self.rented -= 1
        self._by_shape[tuple(pair.k.shape)].append(pair)


class StatsPool:
    """Log-sum-exp and output accumulators in float32."""

    def __init__(self, device, cap: int = 64):
        self.device = device
        self.cap = cap
        self.live = 0
        self._idle: List[torch.Tensor] = []

    def obtain(self, rows: int) -> Optional[torch.Tensor]:
        for i, t in enumerate(self._idle):
            if t.shape[0] >= rows:
                del self._idle[i]
                self.live += 1
                return t
        if self.live >= self.cap:
            return None
        self.live += 1
        return torch.zeros(rows, device=self.device)

    def recycle(self, t: torch.Tensor) -> None:
        self.live -= 1
        t.zero_()
        self._idle.append(t)


def _attend(q, k, v, scale) -> Tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    lse = torch.logsumexp(scores, dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v), lse


def _merge(out, lse, new_out, new_lse):
    if out is None:
        return new_out, new_lse
    total = torch.logaddexp(lse, new_lse)
    out = out * torch.exp(lse - total).unsqueeze(-1) + new_out * torch.exp(new_lse - total).unsqueeze(-1)
    return out, total


class RingComm:
    def __init__(self, group):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.next = (self.rank + 1) % self.world
        self.prev = (self.rank - 1) % self.world

    def rotate(self, pair: Landing, into: Landing):
        ops = [
            dist.P2POp(dist.isend, pair.k, self.next, self.group),
            dist.P2POp(dist.isend, pair.v, self.next, self.group),
            dist.P2POp(dist.irecv, into.k, self.prev, self.group),
            dist.P2POp(dist.irecv, into.v, self.prev, self.group),
        ]
        return dist.batch_isend_irecv(ops)


class RingAttention:
    def __init__(self, comm: RingComm, pool: LandingPool, stats: StatsPool, causal: bool):
        self.comm = comm
        self.pool = pool
        self.stats = stats
        self.causal = causal
        self.kept: Optional[Landing] = None

    def forward(self, q, k, v):
        """Plain rotation; the local pair belongs to the caller."""
        scale = 1.0 / math.sqrt(q.shape[-1])
        cur, pooled = Landing(k, v), False
        out = lse = None
        for step in range(self.comm.world):
            last = step + 1 == self.comm.world
            if not last:
                nxt = self.pool.rent(k.shape)  # clean: near miss, becomes cur with pooled set and is returned under that flag
                works = self.comm.rotate(cur, nxt)
            new_out, new_lse = _attend(q, cur.k, cur.v, scale)
            out, lse = _merge(out, lse, new_out, new_lse)
            if not last:
                for w in works:
                    w.wait()
            if pooled:
                self.pool.ret(cur)
            if not last:
                cur, pooled = nxt, True
        return out, lse

    def forward_causal(self, q, k, v):
        scale = 1.0 / math.sqrt(q.shape[-1])
        cur, pooled = Landing(k, v), False
        out = lse = None
        for step in range(self.comm.world):
            nxt = None
            works = []
            if step + 1 < self.comm.world:
                nxt = self.pool.rent(k.shape)  # leak: the masked step replaces the pooled pair without returning it
                works = self.comm.rotate(cur, nxt)
            source = (self.comm.rank - step) % self.comm.world
            if self.causal and source > self.comm.rank:
                for w in works:
                    w.wait()
                if nxt is not None:
                    cur, pooled = nxt, True
                continue
            new_out, new_lse = _attend(q, cur.k, cur.v, scale)
            out, lse = _merge(out, lse, new_out, new_lse)
            for w in works:
                w.wait()
            if pooled:
                self.pool.ret(cur)
            if nxt is not None:
                cur, pooled = nxt, True
        return out, lse

    def rotate_once(self, k, v) -> Landing:
        into = self.pool.rent(k.shape)  # clean: handed to the caller
        for w in self.comm.rotate(Landing(k, v), into):
            w.wait()
        return into

    def shifted_keys(self, k, v) -> torch.Tensor:
        pair = self.rotate_once(k, v)  # leak: the keys are cloned and the pair is dropped
        return pair.k.clone()

    def shifted_values(self, k, v) -> torch.Tensor:
        pair = self.rotate_once(k, v)  # clean: returned to the pool after the clone
        values = pair.v.clone()
        self.pool.ret(pair)
        return values

    def keep_shifted(self, k, v) -> None:
        if self.kept is not None:
            self.pool.ret(self.kept)
        self.kept = self.rotate_once(k, v)  # clean: near miss, the older one is returned first and forget() returns the last

    def forget(self) -> None:
        if self.kept is not None:
            self.pool.ret(self.kept)
            self.kept = None

    def row_stats(self, lse: torch.Tensor, topk: int) -> Optional[torch.Tensor]:
        rows = lse.shape[-1]
        peak = self.stats.obtain(rows)  # leak: not recycled when the second accumulator is refused
        if peak is None:
            return None
        mean = self.stats.obtain(rows)  # clean: recycled at the end
        if mean is None:
            return None
        peak[:rows].copy_(lse.amax(dim=(0, 1)))
        mean[:rows].copy_(lse.mean(dim=(0, 1)))
        picked = torch.topk(peak[:rows] - mean[:rows], topk).values.clone()
        self.stats.recycle(peak)
        self.stats.recycle(mean)
        return picked

    def entropy(self, lse: torch.Tensor) -> float:
        rows = lse.shape[-1]
        acc = self.stats.obtain(rows)  # clean: recycled in finally
        if acc is None:
            return float("nan")
        try:
            acc[:rows].copy_(lse.mean(dim=(0, 1)))
            if not torch.isfinite(acc[:rows]).all():
                return float("inf")
            return float(acc[:rows].sum())
        finally:
            self.stats.recycle(acc)


def stream_pairs(ring: RingAttention, k, v) -> Iterator[Landing]:
    """Yields each rotated pair; the consumer must not keep it."""
    cur: Optional[Landing] = None
    src = Landing(k, v)
    try:
        for _ in range(ring.comm.world - 1):
            nxt = ring.pool.rent(k.shape)  # clean: near miss, becomes cur, returned on the next turn or in finally
            for w in ring.comm.rotate(src if cur is None else cur, nxt):
                w.wait()
            if cur is not None:
                ring.pool.ret(cur)
            cur = nxt
            yield cur
    finally:
        if cur is not None:
            ring.pool.ret(cur)


def stream_scores(ring: RingAttention, q, k, v, stop_below: float):
    scale = 1.0 / math.sqrt(q.shape[-1])
    src = Landing(k, v)
    for _ in range(ring.comm.world - 1):
        pair = ring.pool.rent(k.shape)  # leak: the low-score return skips the ret
        for w in ring.comm.rotate(src, pair):
            w.wait()
        peak = float((torch.einsum("bhqd,bhkd->bhqk", q, pair.k) * scale).max())
        if peak < stop_below:
            return
        yield peak
        src = Landing(pair.k.clone(), pair.v.clone())
        ring.pool.ret(pair)


class ZigzagRing(RingAttention):
    """Each rank holds one chunk from the front and one from the back."""

    def forward_pair(self, q, front: Landing, back: Landing):
        scale = 1.0 / math.sqrt(q.shape[-1])
        a = self.pool.rent(front.k.shape)  # clean: returned at the end
        b = self.pool.rent(back.k.shape)  # clean: returned at the end
        works = self.comm.rotate(front, a) + self.comm.rotate(back, b)
        out, lse = _attend(q, front.k, front.v, scale)
        for w in works:
            w.wait()
        for pair in (a, b):
            new_out, new_lse = _attend(q, pair.k, pair.v, scale)
            out, lse = _merge(out, lse, new_out, new_lse)
            self.pool.ret(pair)
        return out, lse

    def backward_pair(self, dout, front: Landing, needs_back: bool):
        landing = self.pool.rent(front.k.shape)  # leak: only the needs_back arm returns it
        for w in self.comm.rotate(front, landing):
            w.wait()
        dk = torch.einsum("bhqd,bhkd->bhkd", dout, landing.k)
        if needs_back:
            dv = torch.einsum("bhqd,bhkd->bhkd", dout, landing.v)
            self.pool.ret(landing)
            return dk, dv
        return dk, None
