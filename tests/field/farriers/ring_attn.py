"""Ring attention over a context-parallel group with preallocated KV exchange pairs."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(eq=False)
class KVPair:
    k: Tensor
    v: Tensor
    slot: int

    def load_(self, k: Tensor, v: Tensor) -> "KVPair":
        self.k.copy_(k)
        self.v.copy_(v)
        return self


class KVPairPool:
    def __init__(self, depth: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._idle: deque[KVPair] = deque(
            KVPair(
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
                i,
            )
            for i in range(depth)
        )
        self.out = 0

    def checkout(self) -> KVPair | None:
        if not self._idle:
            return None
        pair = self._idle.popleft()
        self.out += 1
        return pair

    def checkin(self, pair: KVPair) -> None:
        self.out -= 1
        self._idle.append(pair)


class RingComm:
    def __init__(self, group: dist.ProcessGroup, pool: KVPairPool) -> None:
        self.group = group
        self.pool = pool
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._works: list[dist.Work] = []

    def rotate(self, cur: KVPair) -> KVPair | None:
        nxt = self.pool.checkout()  # clean: handed to the caller, who checks it in
        if nxt is None:
            return None
        dst = dist.get_global_rank(self.group, (self.rank + 1) % self.world)
        src = dist.get_global_rank(self.group, (self.rank - 1) % self.world)
        ops = []
        for s, r in ((cur.k, nxt.k), (cur.v, nxt.v)):
            ops.append(dist.P2POp(dist.isend, s, dst, self.group))
            ops.append(dist.P2POp(dist.irecv, r, src, self.group))
        self._works = dist.batch_isend_irecv(ops)
        return nxt

    def wait(self) -> None:
        for w in self._works:
            w.wait()
        self._works = []


def _block(q: Tensor, pair: KVPair, causal: bool) -> tuple[Tensor, Tensor]:
    scores = q @ pair.k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        s = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ pair.v, lse


def _merge(out: Tensor | None, lse: Tensor | None, o: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    if out is None or lse is None:
        return o, l
    return out - F.sigmoid(l - lse) * (out - o), lse - F.logsigmoid(lse - l)


def ring_forward(comm: RingComm, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor | None:
    pool = comm.pool
    cur = pool.checkout()  # clean: near miss, the out-of-pairs return checks it in and so does every turn of the loop
    if cur is None:
        return None
    cur.load_(k, v)
    out = lse = None
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = comm.rotate(cur)  # clean: near miss, becomes cur and is checked in on the next turn
            if nxt is None:
                pool.checkin(cur)
                return None
        if not causal or step <= comm.rank:
            out, lse = _merge(out, lse, *_block(q, cur, causal and step == 0))
        comm.wait()
        pool.checkin(cur)
        if nxt is None:
            break
        cur = nxt
    return out


def ring_backward(comm: RingComm, q: Tensor, dout: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor | None:
    pool = comm.pool
    cur = pool.checkout()  # clean: near miss, step 0 is never skipped so the first pair is always checked in
    if cur is None:
        return None
    cur.load_(k, v)
    dq = torch.zeros_like(q)
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = comm.rotate(cur)  # leak: the causal skip rebinds cur and never checks the received pair in
            if nxt is None:
                pool.checkin(cur)
                return None
        if causal and step > comm.rank:
            comm.wait()
            if nxt is not None:
                cur = nxt
            continue
        dq += (dout @ cur.v.transpose(-1, -2)) @ cur.k
        comm.wait()
        pool.checkin(cur)
        if nxt is not None:
            cur = nxt
    return dq


def zigzag_local(pool: KVPairPool, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    k0, k1 = k.chunk(2, dim=-2)
    v0, v1 = v.chunk(2, dim=-2)
    head = pool.checkout()  # leak: lost when no second pair is left for the tail
    if head is None:
        return None
    tail = pool.checkout()  # clean: checked in with the head
    if tail is None:
        return None
    q0, q1 = q.chunk(2, dim=-2)
    out = torch.cat([_block(q0, head.load_(k0, v0), True)[0], _block(q1, tail.load_(k1, v1), True)[0]], dim=-2)
    for pair in (head, tail):
        pool.checkin(pair)
    return out


class LayerPrefetch:
    def __init__(self, pool: KVPairPool) -> None:
        self.pool = pool
        self._next: KVPair | None = None

    def prime(self, k: Tensor, v: Tensor) -> None:
        pair = self.pool.checkout()  # leak: a local layer never consumes the primed pair and the next prime overwrites it
        if pair is None:
            return
        self._next = pair.load_(k, v)

    def consume(self, q: Tensor) -> Tensor | None:
        pair, self._next = self._next, None
        if pair is None:
            return None
        out = _block(q, pair, True)[0]
        self.pool.checkin(pair)
        return out


def run_layers(layers, pf: LayerPrefetch, comm: RingComm, x: Tensor) -> Tensor:
    for layer in layers:
        q, k, v = layer.qkv(x)
        pf.prime(k, v)
        if layer.is_local:
            x = layer.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            continue
        att = pf.consume(q)
        x = layer.proj(att if att is not None else ring_forward(comm, q, k, v))
    return x
