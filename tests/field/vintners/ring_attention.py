"""Ring attention over a context-parallel group, with rotating key/value blocks."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist


@dataclass(eq=False)
class KVBlock:
    index: int
    k: torch.Tensor
    v: torch.Tensor


class BlockRing:
    """A ring of preallocated KV blocks; next_block() walks it, retire() makes one reusable."""

    def __init__(self, size: int, shape: Tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self._blocks = [
            KVBlock(i, *(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
            for i in range(size)
        ]
        self._live = [False] * size
        self._head = 0

    def next_block(self) -> KVBlock:
        for step in range(len(self._blocks)):
            i = (self._head + step) % len(self._blocks)
            if not self._live[i]:
                self._live[i] = True
                self._head = i + 1
                return self._blocks[i]
        raise RuntimeError("all KV blocks are live")

    def maybe_next(self) -> Optional[KVBlock]:
        return None if all(self._live) else self.next_block()  # clean: handed to the caller

    def retire(self, block: KVBlock) -> None:
        self._live[block.index] = False

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> KVBlock:
        block = self.next_block()  # clean: handed to the caller
        block.k.copy_(k)
        block.v.copy_(v)
        return block


def _rotate(block: KVBlock, into: KVBlock, group) -> List[object]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    nxt, prv = (rank + 1) % world, (rank - 1) % world
    ops = [
        dist.P2POp(dist.isend, block.k, nxt, group),
        dist.P2POp(dist.isend, block.v, nxt, group),
        dist.P2POp(dist.irecv, into.k, prv, group),
        dist.P2POp(dist.irecv, into.v, prv, group),
    ]
    return dist.batch_isend_irecv(ops)


def _merge(out, lse, part, part_lse):
    if out is None:
        return part, part_lse
    new = torch.logaddexp(lse, part_lse)
    out = out * torch.exp(lse - new).unsqueeze(-1) + part * torch.exp(part_lse - new).unsqueeze(-1)
    return out, new


def _attend(q, k, v, causal: bool):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def ring_forward(q, k, v, ring: BlockRing, group, causal: bool = True):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    cur = ring.fill(k, v)  # clean: retired in the loop or after it
    out = lse = None
    for step in range(world):
        incoming: Optional[KVBlock] = None
        works: List[object] = []
        if step + 1 < world:
            incoming = ring.next_block()  # clean: near miss, becomes cur after the old one is retired
            works = _rotate(cur, incoming, group)
        owner = (rank - step) % world
        if not causal or owner <= rank:
            part, part_lse = _attend(q, cur.k, cur.v, causal and owner == rank)
            out, lse = _merge(out, lse, part, part_lse)
        for w in works:
            w.wait()
        if incoming is not None:
            ring.retire(cur)
            cur = incoming
    ring.retire(cur)
    return out, lse


def ring_scores(q, k, ring: BlockRing, group) -> torch.Tensor:
    """Only the row maxima, for the entropy monitor."""
    world = dist.get_world_size(group)
    cur = ring.fill(k, k)  # leak: cur is rebound each step and never retired
    best = None
    for step in range(world):
        top = (q @ cur.k.transpose(-1, -2)).amax(-1)
        best = top if best is None else torch.maximum(best, top)
        if step == world - 1:
            break
        incoming = ring.next_block()  # leak: replaces cur, and cur is never retired
        for w in _rotate(cur, incoming, group):
            w.wait()
        cur = incoming
    return best


def ring_forward_windowed(q, k, v, ring: BlockRing, group, window: int):
    """Stop as soon as the blocks are out of the attention window."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    cur = ring.fill(k, v)  # clean: retired at each hand-over and at the end
    out = lse = None
    for step in range(world):
        part, part_lse = _attend(q, cur.k, cur.v, step == 0)
        out, lse = _merge(out, lse, part, part_lse)
        if step + 1 == world:
            break
        incoming = ring.next_block()  # leak: leaving at the window edge drops it
        works = _rotate(cur, incoming, group)
        for w in works:
            w.wait()
        if step + 1 >= window or rank - step - 1 < 0:
            break
        ring.retire(cur)
        cur = incoming
    ring.retire(cur)
    return out, lse


class RingBackward:
    """Backward pass: KV travels together with the accumulators of its gradient."""

    def __init__(self, ring: BlockRing, grads: BlockRing, group) -> None:
        self.ring = ring
        self.grads = grads
        self.group = group
        self._kv: Optional[KVBlock] = None
        self._acc: Optional[KVBlock] = None

    def begin(self, k, v) -> None:
        self._kv = self.ring.fill(k, v)  # clean: advance() and end() retire it
        self._acc = self.grads.next_block()  # leak: advance() overwrites it without retiring
        self._acc.k.zero_()
        self._acc.v.zero_()

    def accumulate(self, dk, dv) -> None:
        self._acc.k.add_(dk)
        self._acc.v.add_(dv)

    def advance(self) -> None:
        nxt = self.ring.next_block()  # clean: near miss, swapped in, the old one is retired
        acc = self.grads.next_block()  # leak: the next advance() overwrites it, only the last is retired
        works = _rotate(self._kv, nxt, self.group) + _rotate(self._acc, acc, self.group)
        for w in works:
            w.wait()
        self.ring.retire(self._kv)
        self._kv = nxt
        self._acc = acc

    def end(self) -> Tuple[torch.Tensor, torch.Tensor]:
        dk, dv = self._acc.k.clone(), self._acc.v.clone()
        self.grads.retire(self._acc)
        self.ring.retire(self._kv)
        self._acc = self._kv = None
        return dk, dv


class PrefixCache:
    """Blocks of shared document prefixes, kept between steps."""

    def __init__(self, ring: BlockRing, limit: int) -> None:
        self.ring = ring
        self.limit = limit
        self._by_doc: Dict[int, KVBlock] = {}

    def put(self, doc: int, k, v) -> bool:
        if doc in self._by_doc:
            return True
        if len(self._by_doc) >= self.limit:
            self.evict(next(iter(self._by_doc)))
        block = self.ring.maybe_next()  # clean: near miss, evict() and clear() retire it
        if block is None:
            return False
        block.k.copy_(k)
        block.v.copy_(v)
        self._by_doc[doc] = block
        return True

    def refresh(self, doc: int, k, v) -> None:
        """Newer weights: replace the stored prefix."""
        old = self._by_doc.get(doc)
        if old is not None:
            self.ring.retire(old)
        self._by_doc[doc] = self.ring.fill(k, v)  # clean: near miss, the old entry is retired first

    def evict(self, doc: int) -> None:
        self.ring.retire(self._by_doc.pop(doc))

    def clear(self) -> None:
        for block in self._by_doc.values():
            self.ring.retire(block)
        self._by_doc = {}


def self_check(ring: BlockRing, k, v, tol: float) -> bool:
    a = ring.fill(k, v)  # clean: retired on both returns
    b = ring.maybe_next()  # leak: the early return on a mismatch retires only a
    if b is None:
        ring.retire(a)
        return False
    b.k.copy_(a.k)
    b.v.copy_(a.v)
    if float((b.k - k).abs().max()) > tol:
        ring.retire(a)
        return False
    same = bool(torch.equal(b.v, a.v))
    ring.retire(b)
    ring.retire(a)
    return same
