"""Ring exchange of K/V blocks for context-parallel attention.

Every rank sends its block to the next rank while it attends to the one it has.
Receive buffers come from a small ring pool, which counts references because a
block can be read by the compute stream and by the sender at the same time.
"""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger("ring")


@dataclass
class KVBuf:
    k: torch.Tensor
    v: torch.Tensor
    rc: int = 0
    origin: int = -1


class RingPool:
    def __init__(self, depth: int, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._ready: Deque[KVBuf] = deque()
        for _ in range(depth):
            self._ready.append(KVBuf(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)))

    def fresh(self) -> KVBuf:
        b = self._ready.popleft()  # clean: handed to the caller with one reference
        b.rc = 1
        return b

    def fresh_or_none(self) -> Optional[KVBuf]:
        return self.fresh() if self._ready else None  # clean: handed to the caller

    def addref(self, b: KVBuf) -> KVBuf:
        b.rc += 1
        return b

    def deref(self, b: KVBuf) -> None:
        b.rc -= 1
        if b.rc == 0:
            b.origin = -1
            self._ready.append(b)


class Channel:
    """Posts p2p operations to both neighbours."""

    def __init__(self, pool: RingPool, rank: int, world: int) -> None:
        self.pool = pool
        self.rank = rank
        self.world = world
        self._sending: List[Tuple[dist.Work, KVBuf]] = []

    def post_send(self, b: KVBuf) -> None:
        nxt = (self.rank + 1) % self.world
        self.pool.addref(b)  # clean: near miss, listed in _sending, which settle() dereferences
        self._sending.append((dist.isend(b.k, nxt), b))
        w = dist.isend(b.v, nxt)
        w.wait()

    def settle(self) -> None:
        while self._sending:
            w, b = self._sending.pop()
            w.wait()
            self.pool.deref(b)

    def receive(self, origin: int) -> KVBuf:
        b = self.pool.fresh()  # clean: handed to the caller
        prev = (self.rank - 1) % self.world
        dist.recv(b.k, prev)
        dist.recv(b.v, prev)
        b.origin = origin
        return b

    def try_receive(self, origin: int) -> Optional[KVBuf]:
        b = self.pool.fresh_or_none()  # leak: not dereferenced when the neighbour has not posted a block
        if b is None:
            return None
        hdr = torch.zeros(2, dtype=torch.int64)
        dist.recv(hdr, (self.rank - 1) % self.world)
        if int(hdr[0]) != origin:
            log.debug("neighbour is at %d, not %d", int(hdr[0]), origin)
            return None
        dist.recv(b.k, (self.rank - 1) % self.world)
        dist.recv(b.v, (self.rank - 1) % self.world)
        b.origin = origin
        return b


def attend(q: torch.Tensor, b: KVBuf) -> Tuple[torch.Tensor, torch.Tensor]:
    s = torch.einsum("qhd,khd->hqk", q.float(), b.k.float())
    lse = s.logsumexp(-1)
    o = torch.einsum("hqk,khd->qhd", s.softmax(-1), b.v.float())
    return o, lse


class RingAttention:
    def __init__(self, pool: RingPool, chan: Channel) -> None:
        self.pool = pool
        self.chan = chan
        self.kept: Dict[int, KVBuf] = {}

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        cur = self.pool.fresh()  # clean: near miss, each round dereferences the former current block
        cur.k.copy_(k)
        cur.v.copy_(v)
        cur.origin = self.chan.rank
        parts = []
        for step in range(self.chan.world):
            last = step == self.chan.world - 1
            if not last:
                self.chan.post_send(cur)
            parts.append(attend(q, cur))
            if not last:
                nxt = self.chan.receive((self.chan.rank - step - 1) % self.chan.world)  # clean: becomes the current block
                self.pool.deref(cur)
                cur = nxt
        self.pool.deref(cur)
        self.chan.settle()
        return parts

    def forward_keep(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """As forward(), but keeps remote blocks for the backward pass."""
        self.drop_kept()
        cur = self.pool.fresh()  # leak: the local block is never kept nor dereferenced once cur is rebound
        cur.k.copy_(k)
        cur.v.copy_(v)
        parts = [attend(q, cur)]
        for step in range(1, self.chan.world):
            self.chan.post_send(cur)
            cur = self.chan.receive((self.chan.rank - step) % self.chan.world)  # clean: near miss, kept by origin until drop_kept()
            self.kept[cur.origin] = cur
            parts.append(attend(q, cur))
        self.chan.settle()
        return parts

    def drop_kept(self) -> None:
        for b in self.kept.values():
            self.pool.deref(b)
        self.kept.clear()

    def backward_from(self, origin: int, dq: torch.Tensor) -> Optional[torch.Tensor]:
        b = self.kept.get(origin)
        if b is None:
            return None
        self.pool.addref(b)  # leak: the extra reference survives a gradient that is all zero
        if not dq.any():
            return torch.zeros_like(b.k)
        g = torch.einsum("qhd,qhk->khd", dq, torch.ones(dq.shape[0], dq.shape[1], b.k.shape[0], device=dq.device))
        self.pool.deref(b)
        return g

    def scan(self, q: torch.Tensor, origins: List[int]) -> Iterator[torch.Tensor]:
        """Partial outputs of the listed origins, one by one."""
        for o in origins:
            b = self.chan.try_receive(o)  # clean: near miss, None ends the scan, else dereferenced in finally even if the consumer stops
            if b is None:
                return
            try:
                yield attend(q, b)[0]
            finally:
                self.pool.deref(b)

    def scan_pairs(self, q: torch.Tensor, origins: List[int]) -> Iterator[torch.Tensor]:
        for lo, hi in zip(origins[::2], origins[1::2]):
            a = self.chan.try_receive(lo)  # leak: kept when the second of the pair is missing
            if a is None:
                return
            b = self.chan.try_receive(hi)  # clean: dereferenced before the yield
            if b is None:
                return
            out = attend(q, a)[0] + attend(q, b)[0]
            self.pool.deref(a)
            self.pool.deref(b)
            yield out

    def share_local(self, readers: int, k: torch.Tensor, v: torch.Tensor) -> List[KVBuf]:
        b = self.pool.fresh()  # clean: near miss, its first reference is dropped, the readers hold their own
        b.k.copy_(k)
        b.v.copy_(v)
        views = [self.pool.addref(b) for _ in range(readers)]  # clean: one reference each, handed to the readers
        self.pool.deref(b)
        return views

    def warm(self, q: torch.Tensor) -> float:
        views = self.share_local(2, q, q)  # leak: only the first of two references is dropped
        val = float(attend(q, views[0])[1].mean())
        self.pool.deref(views[0])
        return val
