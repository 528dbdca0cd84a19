# context parallel (ring) attention
# each rank keeps its queries and passes key/value chunks around the ring through pooled buffers
from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist


class KV(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


class KVChunkPool:
    def __init__(self, shape, depth=3):
        self.shape = tuple(shape)
        self.chunks: List[KV] = [KV(torch.empty(self.shape), torch.empty(self.shape)) for _ in range(depth)]

    def get_chunk(self) -> KV:
        if not self.chunks:
            return KV(torch.empty(self.shape), torch.empty(self.shape))
        return self.chunks.pop()

    def put_chunk(self, kv: KV) -> None:
        self.chunks.append(kv)


def _merge(o, lse, o_new, lse_new):
    top = torch.maximum(lse, lse_new)
    a, b = (lse - top).exp(), (lse_new - top).exp()
    return (o * a + o_new * b) / (a + b), top + (a + b).log()


def _attend(q, kv: KV, causal: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    s = q @ kv.k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp() @ kv.v, lse


class RingAttention:
    def __init__(self, pool: KVChunkPool, rank: int, world: int, causal: bool = True):
        self.pool = pool
        self.rank = rank
        self.world = world
        self.causal = causal

    def _shift(self, kv: KV, into: KV) -> None:
        ops = []
        for src, dst in zip(kv, into):
            ops.append(dist.P2POp(dist.isend, src, (self.rank + 1) % self.world))
            ops.append(dist.P2POp(dist.irecv, dst, (self.rank - 1) % self.world))
        for w in dist.batch_isend_irecv(ops):
            w.wait()

    def _load(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        kv = self.pool.get_chunk()  # clean: returned to the caller
        kv.k.copy_(k)
        kv.v.copy_(v)
        return kv

    def forward(self, q, k, v):
        cur = self._load(k, v)  # clean: near miss, each swap puts the displaced chunk back
        o, lse = _attend(q, cur, self.causal)
        for step in range(1, self.world):
            nxt = self.pool.get_chunk()  # clean: becomes the current chunk, the last one is put back below
            self._shift(cur, nxt)
            self.pool.put_chunk(cur)
            cur = nxt
            if self.causal and step > self.rank:
                continue
            o, lse = _merge(o, lse, *_attend(q, cur, False))
        self.pool.put_chunk(cur)
        return o

    def forward_early_stop(self, q, k, v):
        """Causal ranks need not compute on chunks of later ranks."""
        cur = self._load(k, v)  # leak: the stop after this rank's last chunk returns with cur
        spare = self.pool.get_chunk()  # leak: the same return forgets the spare
        o, lse = _attend(q, cur, self.causal)
        for step in range(1, self.world):
            self._shift(cur, spare)
            cur, spare = spare, cur
            if self.causal and step > self.rank:
                return o
            o, lse = _merge(o, lse, *_attend(q, cur, False))
        self.pool.put_chunk(cur)
        self.pool.put_chunk(spare)
        return o

    def forward_two_buffers(self, q, k, v):
        cur = self._load(k, v)  # clean: the exchange of names loses nothing, both are put back
        spare = self.pool.get_chunk()  # clean: the exchange of names loses nothing, both are put back
        o, lse = _attend(q, cur, self.causal)
        for step in range(1, self.world):
            self._shift(cur, spare)
            cur, spare = spare, cur
            if self.causal and step > self.rank:
                break
            o, lse = _merge(o, lse, *_attend(q, cur, False))
        for kv in (cur, spare):
            self.pool.put_chunk(kv)
        return o

    def backward(self, q, k, v, grad_out):
        cur = self._load(k, v)  # leak: the first round rebinds cur without putting it back
        dq = torch.zeros_like(q)
        for _ in range(self.world - 1):
            nxt = self.pool.get_chunk()  # leak: overwrites the name of the chunk before, only the last is put back
            self._shift(cur, nxt)
            cur = nxt
            s = q @ cur.k.transpose(-1, -2)
            dq += (grad_out @ cur.v.transpose(-1, -2) * s.softmax(-1)) @ cur.k
        self.pool.put_chunk(cur)
        return dq

    def gather_kv(self, k, v) -> Tuple[torch.Tensor, torch.Tensor]:
        chunks = [self._load(k, v)]  # clean: all chunks of the list are put back after the concatenation
        for _ in range(self.world - 1):
            nxt = self.pool.get_chunk()  # clean: appended to the list
            self._shift(chunks[-1], nxt)
            chunks.append(nxt)
        ks = torch.cat([c.k for c in chunks], dim=-2)
        vs = torch.cat([c.v for c in chunks], dim=-2)
        while chunks:
            self.pool.put_chunk(chunks.pop())
        return ks, vs

    def key_norm(self, k, v, limit: Optional[float] = None) -> float:
        kv = self._load(k, v)  # clean: near miss, put back before the limit is looked at
        n = float(kv.k.norm())
        self.pool.put_chunk(kv)
        if limit is not None and n > limit:
            raise ValueError("key norm %.1f above limit" % n)
        return n
