"""Dilated self-attention for long sequences, scratch taken from a pool."""
from __future__ import annotations

import math
from collections import defaultdict
from typing import Dict, Optional, Sequence, Tuple

try:
    import torch
except ImportError:  # the planner runs on hosts without torch
    torch = None


class ScratchPool:
    """Free lists of scratch tensors, keyed by shape and dtype."""

    def __init__(self, device: str = "cuda"):
        self.device = device
        self._free: Dict[tuple, list] = defaultdict(list)
        self._live: Dict[int, tuple] = {}

    def acquire(self, shape, dtype) -> "torch.Tensor":
        key = (tuple(shape), dtype)
        bucket = self._free[key]
        t = bucket.pop() if bucket else torch.empty(key[0], dtype=dtype, device=self.device)
        self._live[id(t)] = (key, t)
        return t

    def release(self, t: "torch.Tensor") -> None:
        key, _ = self._live.pop(id(t))
        self._free[key].append(t)

    @property
    def live(self) -> int:
        return len(self._live)


class DilatedAttention:
    """Attention over (segment, rate) branches, combined by their softmax mass."""

    def __init__(self, pool: ScratchPool, branches: Sequence[Tuple[int, int]],
                 alibi: bool = False, pad_from: Optional[int] = None):
        self.pool = pool
        self.branches = list(branches)
        self.alibi = alibi
        self.pad_from = pad_from
        self.skipped = 0

    def _gather(self, x, start: int, seg: int, rate: int):
        rows = x[start:start + seg:rate]
        out = self.pool.acquire(rows.shape, x.dtype)  # clean: returned to the caller
        out.copy_(rows)
        return out

    def _scores(self, q, k):
        s = self.pool.acquire((q.shape[0], k.shape[0]), q.dtype)  # clean: returned to the caller
        torch.mm(q, k.t(), out=s)
        s.mul_(1.0 / math.sqrt(q.shape[1]))
        return s

    def _bias(self, n: int, dtype):
        b = self.pool.acquire((n, 1), dtype)  # clean: returned to the caller
        b.copy_(-torch.arange(n, dtype=dtype).unsqueeze(1) / n)
        return b

    def _segment(self, q, k, v, start: int, seg: int, rate: int, out) -> None:
        qs = self._gather(q, start, seg, rate)  # clean: given back on both ways
        ks = self._gather(k, start, seg, rate)  # clean: given back on both ways
        scores = self._scores(qs, ks)  # leak: early return for padded segments gives back qs and ks only
        if self.pad_from is not None and start >= self.pad_from:
            self.pool.release(qs)
            self.pool.release(ks)
            self.skipped += 1
            return
        vs = self._gather(v, start, seg, rate)  # clean: given back in the loop below
        probs = torch.softmax(scores, dim=-1)
        out[start:start + seg:rate] += probs @ vs
        for t in (qs, ks, vs, scores):
            self.pool.release(t)

    def forward(self, q, k, v):
        n = q.shape[0]
        total = torch.zeros_like(q)
        bias = None
        if self.alibi:
            bias = self._bias(n, q.dtype)  # clean: near miss, given back under the same flag below
        for seg, rate in self.branches:
            acc = self.pool.acquire(q.shape, q.dtype)  # leak: continue for segments longer than the input
            acc.zero_()
            if seg > n:
                self.skipped += 1
                continue
            for start in range(0, n, seg):
                self._segment(q, k, v, start, seg, rate, acc)
            if self.alibi:
                acc.add_(bias)
            total.add_(acc)
            self.pool.release(acc)
        if self.alibi:
            self.pool.release(bias)
        return total / max(1, len(self.branches))

    def sample_keys(self, k, rate: int):
        """Every rate-th key, for the landmark index."""
        return self._gather(k, 0, k.shape[0], rate).clone()  # leak: the copy is returned, the pooled tensor dropped

    def entropy(self, q, k) -> float:
        s = self._scores(q, k)  # clean: near miss, the name is bound again only after the release
        p = torch.softmax(s, dim=-1)
        self.pool.release(s)
        s = p.clamp_min(1e-9).log()
        return float(-(p * s).sum(-1).mean())

    def smooth(self, x, rounds: int):
        """Ping-pong averaging along the sequence."""
        src = self.pool.acquire(x.shape, x.dtype)  # clean: near miss, swapped with dst, both given back
        dst = self.pool.acquire(x.shape, x.dtype)  # clean: near miss, swapped with src, both given back
        src.copy_(x)
        for _ in range(rounds):
            dst.copy_(src)
            dst[1:].add_(src[:-1]).mul_(0.5)
            src, dst = dst, src
        result = src.clone()
        self.pool.release(src)
        self.pool.release(dst)
        return result

    def coarsen(self, x, rates: Sequence[int]):
        cur = self._gather(x, 0, x.shape[0], 1)  # leak: bound again in the loop
        for rate in rates:
            cur = self._gather(cur, 0, cur.shape[0], rate)  # leak: bound again in the next turn
        out = cur.clone()
        self.pool.release(cur)
        return out
