from __future__ import annotations

import math
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

Pair = Tuple[torch.Tensor, torch.Tensor]


class KVRing:
    """k/v landing zones for the neighbour exchange."""

    def __init__(self, shape: Sequence[int], depth: int, dtype=torch.float32):
        self.shape = tuple(shape)
        self._zones: List[Pair] = []
        for _ in range(depth):
            self._zones.append((torch.empty(self.shape, dtype=dtype), torch.empty(self.shape, dtype=dtype)))
        self._lent = 0

    def lend(self) -> Pair:
        if not self._zones:
            raise RuntimeError("ring depth exceeded")
        self._lent += 1
        return self._zones.pop(0)

    def restore(self, pair: Pair) -> None:
        self._lent -= 1
        self._zones.append(pair)


class Comm:
    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world

    def exchange(self, src: Pair, dst: Pair) -> None:
        dst[0].copy_(src[0])
        dst[1].copy_(src[1])


def _merge(out, lse, block_out, block_lse):
    if out is None:
        return block_out, block_lse
    new_lse = torch.logaddexp(lse, block_lse)
    out = out * (lse - new_lse).exp().unsqueeze(-1) + block_out * (block_lse - new_lse).exp().unsqueeze(-1)
    return out, new_lse


def _block(q, k, v):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return s.softmax(-1) @ v, s.logsumexp(-1)


class RingAttention:
    def __init__(self, ring: KVRing, comm: Comm, causal: bool = False):
        self.ring = ring
        self.comm = comm
        self.causal = causal
        self._prefetched: Optional[Pair] = None

    def forward(self, q, k, v):
        cur: Pair = (k, v)
        held: Optional[Pair] = None
        out = lse = None
        for step in range(self.comm.world):
            nxt = None
            if step + 1 < self.comm.world:
                nxt = self.ring.lend()  # clean: near miss, becomes held and is restored one step later
                self.comm.exchange(cur, nxt)
            o, l = _block(q, *cur)
            out, lse = _merge(out, lse, o, l)
            if held is not None:
                self.ring.restore(held)
            if nxt is not None:
                cur = nxt
            held = nxt
        return out

    def forward_causal(self, q, k, v):
        cur: Pair = (k, v)
        out = lse = None
        for step in range(self.comm.world):
            nxt = self.ring.lend()  # leak: steps beyond the own rank skip the block and the restore
            self.comm.exchange(cur, nxt)
            if step > self.comm.rank:
                continue
            o, l = _block(q, nxt[0], nxt[1])
            out, lse = _merge(out, lse, o, l)
            self.ring.restore(nxt)
        return out

    def forward_once(self, q, k, v):
        dst = self.ring.lend()  # clean: restored right after the block
        self.comm.exchange((k, v), dst)
        o, _ = _block(q, *dst)
        self.ring.restore(dst)
        return o

    def forward_unpacked(self, q, k, v):
        rk, rv = self.ring.lend()  # clean: near miss, the parts are packed again for restore
        self.comm.exchange((k, v), (rk, rv))
        o, _ = _block(q, rk, rv)
        self.ring.restore((rk, rv))
        return o

    def keys_only(self, q, k):
        rk, _ = self.ring.lend()  # leak: the pair is taken apart and never restored
        rk.copy_(k)
        return q @ rk.transpose(-1, -2)

    def prefetch(self, k, v) -> None:
        if self._prefetched is None:
            self._prefetched = self.ring.lend()  # clean: near miss, only lent when empty, consume restores it
        self.comm.exchange((k, v), self._prefetched)

    def consume(self, q):
        if self._prefetched is None:
            raise RuntimeError("nothing prefetched")
        pair, self._prefetched = self._prefetched, None
        o, _ = _block(q, *pair)
        self.ring.restore(pair)
        return o


class ZigZagRing(RingAttention):
    def __init__(self, ring: KVRing, comm: Comm, chunks: int):
        super().__init__(ring, comm, causal=True)
        self.chunks = chunks
        self._staged: List[Pair] = []

    def stage(self, ks: Sequence[torch.Tensor], vs: Sequence[torch.Tensor]) -> None:
        for k, v in zip(ks, vs):
            zone = self.ring.lend()  # leak: attend restores all zones but the first
            self.comm.exchange((k, v), zone)
            self._staged.append(zone)

    def attend(self, q):
        out = lse = None
        for zone in self._staged:
            o, l = _block(q, *zone)
            out, lse = _merge(out, lse, o, l)
        for zone in self._staged[1:]:
            self.ring.restore(zone)
        self._staged = []
        return out

    def attend_pairs(self, q, ks, vs):
        zones = [self.ring.lend() for _ in range(min(self.chunks, len(ks)))]  # clean: near miss, popped one by one until the list is empty
        out = lse = None
        for z, k, v in zip(zones, ks, vs):
            self.comm.exchange((k, v), z)
            o, l = _block(q, *z)
            out, lse = _merge(out, lse, o, l)
        while zones:
            self.ring.restore(zones.pop())
        return F.dropout(out, 0.0)

    def reference(self, q, k, v, atol: float) -> bool:
        a = self.ring.lend()  # leak: the mismatch raise comes before restore
        self.comm.exchange((k, v), a)
        o, _ = _block(q, *a)
        ref = F.scaled_dot_product_attention(q, k, v)
        if not torch.allclose(o, ref, atol=atol):
            raise AssertionError("ring result differs from reference")
        self.ring.restore(a)
        return True
