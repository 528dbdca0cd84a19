"""Ring attention over a sequence-parallel group. Key/value blocks travel round the ring in numbered slots."""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Iterator, NamedTuple, Optional

import torch
import torch.distributed as dist


class KV(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    slot: int


class KVRing:
    """Double (or deeper) buffering for blocks in flight."""

    def __init__(self, slots: int, block: int, heads: int, dim: int, device) -> None:
        shape = (slots, 2, block, heads, dim)
        self.storage = torch.empty(shape, device=device, dtype=torch.bfloat16)
        self.idle = list(range(slots))
        self.taken = 0
        self.peak = 0

    def get_block(self) -> KV:
        if not self.idle:
            raise RuntimeError("kv ring exhausted; raise `slots`")
        slot = self.idle.pop()
        self.taken += 1
        self.peak = max(self.peak, self.taken)
        return KV(self.storage[slot, 0], self.storage[slot, 1], slot)

    def put_block(self, kv: KV) -> None:
        self.taken -= 1
        self.idle.append(kv.slot)

    def get_filled(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        kv = self.get_block()  # clean: returned to the caller
        kv.k.copy_(k)
        kv.v.copy_(v)
        return kv


@dataclass
class Partial:
    out: Optional[torch.Tensor] = None
    lse: Optional[torch.Tensor] = None

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self.out is None:
            self.out, self.lse = out, lse
            return
        top = torch.maximum(self.lse, lse)
        a, b = (self.lse - top).exp(), (lse - top).exp()
        self.out = (self.out * a.unsqueeze(-1) + out * b.unsqueeze(-1)) / (a + b).unsqueeze(-1)
        self.lse = top + (a + b).log()


def block_attention(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


class RingContext:
    def __init__(self, ring: KVRing, group, causal: bool = True) -> None:
        self.ring = ring
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.causal = causal
        self.kept: dict[int, KV] = {}
        self.inbox: deque = deque()

    def _swap(self, mine: KV, into: KV) -> None:
        nxt, prv = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        ops = [dist.P2POp(dist.isend, mine.k, nxt, self.group),
               dist.P2POp(dist.irecv, into.k, prv, self.group),
               dist.P2POp(dist.isend, mine.v, nxt, self.group),
               dist.P2POp(dist.irecv, into.v, prv, self.group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def forward(self, q, k, v) -> torch.Tensor:
        """All the way round with two blocks that change places."""
        acc = Partial()
        here = self.ring.get_filled(k, v)  # clean: near miss, swapped with `there`, both are put back
        there = self.ring.get_block()  # clean: near miss, swapped with `here`, both are put back
        for hop in range(self.world):
            if hop + 1 < self.world:
                self._swap(here, there)
            acc.merge(*block_attention(q, here.k, here.v))
            here, there = there, here
        self.ring.put_block(here)
        self.ring.put_block(there)
        return acc.out

    def forward_streaming(self, q, k, v) -> torch.Tensor:
        """A fresh slot for each hop, so that the send of the last one may still be under way."""
        acc = Partial()
        here = self.ring.get_filled(k, v)  # leak: overwritten by the next hop's block
        for hop in range(self.world - 1):
            acc.merge(*block_attention(q, here.k, here.v))
            nxt = self.ring.get_block()  # leak: each hop replaces the last, only the final one is put back
            self._swap(here, nxt)
            here = nxt
        acc.merge(*block_attention(q, here.k, here.v))
        self.ring.put_block(here)
        return acc.out

    def forward_rolling(self, q, k, v) -> torch.Tensor:
        acc = Partial()
        here = self.ring.get_filled(k, v)  # clean: near miss, each hop puts back the block it replaces
        for hop in range(self.world - 1):
            nxt = self.ring.get_block()  # clean: near miss, becomes `here`, put back a hop later
            self._swap(here, nxt)
            acc.merge(*block_attention(q, here.k, here.v))
            self.ring.put_block(here)
            here = nxt
        acc.merge(*block_attention(q, here.k, here.v))
        self.ring.put_block(here)
        return acc.out

    def forward_causal(self, q, k, v) -> torch.Tensor:
        """Blocks of later ranks are masked out wholly."""
        acc = Partial()
        for source, kv in self.blocks(k, v):  # clean: near miss, every block is put back
            if self.causal and source > self.rank:
                self.ring.put_block(kv)
                continue
            acc.merge(*block_attention(q, kv.k, kv.v))
            self.ring.put_block(kv)
        return acc.out

    def blocks(self, k, v) -> Iterator[tuple[int, KV]]:
        """Copies of every rank's block in ring order. They belong to whoever iterates."""
        here = self.ring.get_filled(k, v)  # clean: put back at the end of the round
        there = self.ring.get_block()  # clean: put back at the end of the round
        for hop in range(self.world):
            out = self.ring.get_filled(here.k, here.v)  # clean: near miss, yielded to the iterating caller
            yield (self.rank - hop) % self.world, out
            self._swap(here, there)
            here, there = there, here
        self.ring.put_block(here)
        self.ring.put_block(there)

    def key_stats(self, k, v) -> dict[int, float]:
        """Largest key norm per rank."""
        stats = {}
        for source, kv in self.blocks(k, v):  # leak: the blocks yielded are never put back
            stats[source] = float(kv.k.norm(dim=-1).max())
        return stats

    # backward needs what forward kept -------------------------------------------------------------
    def keep(self, hop: int, k, v) -> None:
        self.kept[hop] = self.ring.get_filled(k, v)  # clean: near miss, replay() pops and puts it back

    def replay(self, q, grad_out) -> torch.Tensor:
        gq = torch.zeros_like(q)
        for hop in sorted(self.kept, reverse=True):
            kv = self.kept.pop(hop)
            qq = q.detach().requires_grad_()
            out, _ = block_attention(qq, kv.k, kv.v)
            gq += torch.autograd.grad(out, qq, grad_out)[0]
            self.ring.put_block(kv)
        return gq

    # zigzag: two half blocks per rank ---------------------------------------------------------------
    def zigzag(self, q, k, v) -> torch.Tensor:
        half = k.shape[0] // 2
        low = self.ring.get_filled(k[:half], v[:half])  # leak: a rank past the middle returns with it
        high = self.ring.get_filled(k[half:], v[half:])  # clean: put back on both ways
        if self.rank * 2 >= self.world:
            out, _ = block_attention(q, high.k, high.v)
            self.ring.put_block(high)
            return out
        acc = Partial()
        for part in (low, high):
            acc.merge(*block_attention(q, part.k, part.v))
        self.ring.put_block(low)
        self.ring.put_block(high)
        return acc.out

    # unordered arrival -----------------------------------------------------------------------------
    def post(self, count: int) -> None:
        for i in range(count):
            kv = self.ring.get_block()  # clean: near miss, inbox until consume()
            self.inbox.append((dist.irecv(kv.k, group=self.group), kv))

    def consume(self, q) -> Partial:
        acc = Partial()
        while self.inbox:
            work, kv = self.inbox.popleft()
            if not work.is_completed():
                work.wait()
            acc.merge(*block_attention(q, kv.k, kv.k))
            self.ring.put_block(kv)
        return acc


class Decoder:
    """Sequence-sharded decoding: this rank's cache grows by one block whenever the last is full."""

    def __init__(self, ring: KVRing, block: int) -> None:
        self.ring = ring
        self.block = block
        self.chain: list[KV] = []
        self.fill = block

    def append(self, k, v) -> None:
        if self.fill == self.block:
            self.chain.append(self.ring.get_block())  # leak: finish() puts back only the last of the chain
            self.fill = 0
        tail = self.chain[-1]
        tail.k[self.fill].copy_(k)
        tail.v[self.fill].copy_(v)
        self.fill += 1

    def attend(self, q) -> torch.Tensor:
        acc = Partial()
        for i, kv in enumerate(self.chain):
            n = self.fill if i == len(self.chain) - 1 else self.block
            acc.merge(*block_attention(q, kv.k[:n], kv.v[:n]))
        return acc.out

    def finish(self) -> None:
        if self.chain:
            self.ring.put_block(self.chain.pop())
        self.chain = []
        self.fill = self.block
