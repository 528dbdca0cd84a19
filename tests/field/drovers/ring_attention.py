"""Ring attention: keys and values travel round the ranks in rotating buffers while queries stay put."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

Vec = List[float]


class KVSlab:
    def __init__(self, ident: int, length: int):
        self.ident = ident
        self.k: Vec = [0.0] * length
        self.v: Vec = [0.0] * length
        self.owner_rank = -1


class SlabRing:
    """Owns the slabs of one layer."""

    def __init__(self, count: int, length: int):
        self.length = length
        self._spare: List[KVSlab] = [KVSlab(i, length) for i in range(count)]
        self._leased: Dict[int, KVSlab] = {}

    def lease(self) -> KVSlab:
        if not self._spare:
            raise RuntimeError("slab ring exhausted")
        slab = self._spare.pop()
        self._leased[slab.ident] = slab
        return slab

    def lease_or_none(self) -> Optional[KVSlab]:
        return self.lease() if self._spare else None  # clean: returned to the caller

    def give_back(self, slab: KVSlab) -> None:
        del self._leased[slab.ident]
        slab.owner_rank = -1
        self._spare.append(slab)

    @property
    def leased(self) -> int:
        return len(self._leased)


@dataclass
class RingComm:
    rank: int
    world: int
    traffic: List[Tuple[int, int]] = field(default_factory=list)

    def send_recv(self, out: KVSlab, into: KVSlab) -> None:
        into.k[:] = out.k
        into.v[:] = out.v
        into.owner_rank = (out.owner_rank - 1) % self.world
        self.traffic.append((self.rank, into.owner_rank))


def _attend(q: float, slab: KVSlab) -> float:
    weights = [math.exp(min(q * k, 30.0)) for k in slab.k]
    return sum(w * v for w, v in zip(weights, slab.v)) / sum(weights)


class RingAttention:
    def __init__(self, ring: SlabRing, comm: RingComm, causal: bool = True):
        self.ring = ring
        self.comm = comm
        self.causal = causal

    def _load(self, k: Vec, v: Vec) -> KVSlab:
        slab = self.ring.lease()  # clean: returned to the caller
        slab.k[:] = k
        slab.v[:] = v
        slab.owner_rank = self.comm.rank
        return slab

    def forward(self, q: float, k: Vec, v: Vec) -> float:
        cur = self._load(k, v)  # clean: near miss, rebinding after each hop follows a give_back, the last one after the loop
        out = 0.0
        for hop in range(self.comm.world):
            out += _attend(q, cur)
            if hop + 1 == self.comm.world:
                break
            nxt = self.ring.lease()  # clean: near miss, becomes the current slab
            self.comm.send_recv(cur, nxt)
            self.ring.give_back(cur)
            cur = nxt
        self.ring.give_back(cur)
        return out / self.comm.world

    def forward_causal(self, q: float, k: Vec, v: Vec) -> float:
        cur = self._load(k, v)  # leak: a skipped hop rebinds cur to nxt without giving the old slab back
        out, seen = 0.0, 0
        for hop in range(self.comm.world - 1):
            nxt = self.ring.lease()  # leak: becomes cur and is lost the same way in the hop after
            self.comm.send_recv(cur, nxt)
            if self.causal and nxt.owner_rank > self.comm.rank:
                cur = nxt
                continue
            out += _attend(q, cur)
            seen += 1
            self.ring.give_back(cur)
            cur = nxt
        out += _attend(q, cur)
        self.ring.give_back(cur)
        return out / (seen + 1)

    def forward_double_buffered(self, q: float, k: Vec, v: Vec) -> float:
        front = self._load(k, v)  # clean: near miss, only the names are exchanged, both are given back at the end
        back = self.ring.lease()  # clean: near miss, as front
        out = 0.0
        for _ in range(self.comm.world):
            self.comm.send_recv(front, back)
            out += _attend(q, front)
            front, back = back, front
        self.ring.give_back(front)
        self.ring.give_back(back)
        return out / self.comm.world

    def backward(self, q: float, k: Vec, v: Vec, grad: float) -> Optional[Tuple[Vec, Vec]]:
        kv = self._load(k, v)  # clean: given back on both ways
        dkv = self.ring.lease_or_none()  # clean: given back after the copy
        if dkv is None:
            self.ring.give_back(kv)
            return None
        for i in range(self.ring.length):
            dkv.k[i] = grad * q * kv.v[i]
            dkv.v[i] = grad * kv.k[i]
        result = list(dkv.k), list(dkv.v)
        self.ring.give_back(dkv)
        self.ring.give_back(kv)
        return result

    def backward_accumulate(self, q: float, k: Vec, v: Vec, grads: List[float]) -> Optional[Vec]:
        acc = self.ring.lease_or_none()  # leak: the return inside the loop keeps it
        if acc is None:
            return None
        acc.k[:] = [0.0] * self.ring.length
        for g in grads:
            part = self.ring.lease_or_none()  # clean: given back each time round
            if part is None:
                return None
            part.k[:] = [g * q * x for x in v]
            acc.k[:] = [a + b for a, b in zip(acc.k, part.k)]
            self.ring.give_back(part)
        total = list(acc.k)
        self.ring.give_back(acc)
        return total

    def logits(self, q: float, k: Vec, v: Vec) -> Vec:
        slab = self._load(k, v)  # leak: the logits are a new list, the slab is dropped
        return [q * x for x in slab.k]
