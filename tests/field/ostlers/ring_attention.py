"""Ring attention over a sequence-parallel group: rotation of key/value shards through lent buffers."""
from __future__ import annotations

import contextlib
import math
import threading
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist


class KVShard(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


class ShardRing:
    """Buffers for one shard of keys and values each."""

    def __init__(self, count: int, batch: int, heads: int, chunk: int, dim: int):
        self._cv = threading.Condition()
        shape = (batch, heads, chunk, dim)
        self._idle: List[KVShard] = [KVShard(torch.empty(shape), torch.empty(shape)) for _ in range(count)]

    def lend(self) -> KVShard:
        with self._cv:
            while not self._idle:
                self._cv.wait()
            return self._idle.pop()

    def lend_nowait(self) -> Optional[KVShard]:
        with self._cv:
            return self._idle.pop() if self._idle else None

    def restore(self, shard: KVShard) -> None:
        with self._cv:
            self._idle.append(shard)
            self._cv.notify()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[KVShard]:
        shard = self.lend()  # clean: restored in finally
        try:
            yield shard
        finally:
            self.restore(shard)


class Neighbour:
    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def rotate(self, src: KVShard, dst: KVShard) -> List[dist.Work]:
        to, frm = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ops = []
        for out, into in zip(src, dst):
            ops.append(dist.P2POp(dist.isend, out, to, self.group))
            ops.append(dist.P2POp(dist.irecv, into, frm, self.group))
        return dist.batch_isend_irecv(ops)


def merge(out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor):
    top = torch.maximum(lse, new_lse)
    w_old, w_new = torch.exp(lse - top), torch.exp(new_lse - top)
    total = w_old + w_new
    return (out * w_old + new_out * w_new) / total, top + torch.log(total)


def block_attention(q: torch.Tensor, shard: KVShard) -> Tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(q, shard.k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    return torch.matmul(torch.exp(scores - lse), shard.v), lse


def start_accumulators(q: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.full(q.shape[:-1] + (1,), -math.inf)


def ring_forward(q: torch.Tensor, own: KVShard, ring: ShardRing, peer: Neighbour) -> torch.Tensor:
    """Full attention; `own` belongs to the caller."""
    out, lse = start_accumulators(q)
    cur = own
    for hop in range(peer.size):
        pending, nxt = [], None
        if hop + 1 < peer.size:
            nxt = ring.lend()  # clean: becomes cur, restored one hop later
            pending = peer.rotate(cur, nxt)
        out, lse = merge(out, lse, *block_attention(q, cur))
        for work in pending:
            work.wait()
        if cur is not own:
            ring.restore(cur)
        if nxt is not None:
            cur = nxt
    return out


def ring_forward_causal(q: torch.Tensor, own: KVShard, ring: ShardRing, peer: Neighbour) -> torch.Tensor:
    out, lse = start_accumulators(q)
    cur = own
    for hop in range(peer.size - 1):
        nxt = ring.lend()  # leak: cur = nxt loses the shard of the hop before
        pending = peer.rotate(cur, nxt)
        if hop <= peer.rank:
            out, lse = merge(out, lse, *block_attention(q, cur))
        for work in pending:
            work.wait()
        cur = nxt
    if peer.rank == peer.size - 1:
        out, lse = merge(out, lse, *block_attention(q, cur))
    if cur is not own:
        ring.restore(cur)
    return out


def gather_shard(ring: ShardRing, peer: Neighbour, own: KVShard, hops: int) -> KVShard:
    """The shard of the rank `hops` behind; the caller restores it."""
    a = ring.lend()  # clean: either returned or restored as the spare
    b = ring.lend()  # clean: either returned or restored as the spare
    a.k.copy_(own.k)
    a.v.copy_(own.v)
    for _ in range(hops):
        for work in peer.rotate(a, b):
            work.wait()
        a, b = b, a
    ring.restore(b)
    return a


def key_norms(ring: ShardRing, peer: Neighbour, own: KVShard) -> torch.Tensor:
    norms = [own.k.norm(dim=-1).amax()]
    for hops in range(1, peer.size):
        shard = gather_shard(ring, peer, own, hops)  # leak: only the norm of the shard is kept
        norms.append(shard.k.norm(dim=-1).amax())
    return torch.stack(norms)


def striped_scores(q: torch.Tensor, own: KVShard, ring: ShardRing, stripes: int) -> torch.Tensor:
    rows = []
    for s in range(stripes):
        with ring.borrowed() as tmp:  # clean: the context manager restores, also on continue
            tmp.k.copy_(torch.roll(own.k, s, dims=2))
            if torch.isinf(tmp.k).any():
                continue
            tmp.v.copy_(own.v)
            rows.append(block_attention(q, tmp)[0])
    return torch.stack(rows) if rows else q.new_empty(0)


class Prefetcher:
    """Holds at most one shard received ahead of its use."""

    def __init__(self, ring: ShardRing, peer: Neighbour):
        self.ring = ring
        self.peer = peer
        self._ahead: Optional[KVShard] = None
        self._works: List[dist.Work] = []

    def start(self, cur: KVShard) -> None:
        if self._ahead is not None:
            return
        self._ahead = self.ring.lend()  # clean: near miss, take hands it out and cancel restores it
        self._works = self.peer.rotate(cur, self._ahead)

    def take(self) -> Optional[KVShard]:
        for work in self._works:
            work.wait()
        shard, self._ahead, self._works = self._ahead, None, []
        return shard

    def cancel(self) -> None:
        shard = self.take()  # clean: None or restored
        if shard is not None:
            self.ring.restore(shard)


def zigzag_forward(q: torch.Tensor, own: KVShard, fetch: Prefetcher, keep: bool) -> Tuple[torch.Tensor, int]:
    """Attention over both halves of the zig-zag order."""
    out, lse = merge(*start_accumulators(q), *block_attention(q, own))
    used = 1
    for _ in range(fetch.peer.size - 1):
        fetch.start(own)
        shard = fetch.take()  # leak: break on an underflown normaliser leaves the shard out
        if shard is None:
            continue
        part, part_lse = block_attention(q, shard)
        if not keep and bool((part_lse < -60).all()):
            break
        out, lse = merge(out, lse, part, part_lse)
        fetch.ring.restore(shard)
        used += 1
    return out, used


def best_effort_backward(grad: torch.Tensor, own: KVShard, ring: ShardRing, peer: Neighbour) -> bool:
    dk = ring.lend_nowait()  # clean: near miss, restored on both ways out
    dv = ring.lend_nowait() if dk is not None else None  # leak: not restored when all gradients are zero
    if dk is None or dv is None:
        if dk is not None:
            ring.restore(dk)
        return False
    dk.k.copy_(grad)
    dv.v.copy_(grad)
    if not bool(grad.any()):
        ring.restore(dk)
        return True
    for work in peer.rotate(own, dk):
        work.wait()
    own.k.add_(dk.k)
    own.v.add_(dv.v)
    ring.restore(dv)
    ring.restore(dk)
    return True
