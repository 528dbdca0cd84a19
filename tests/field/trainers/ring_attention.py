"""Ring attention: K/V shards travel around the sequence-parallel group while every
rank accumulates its own queries with an online softmax."""
import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, List, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class CommBufferPool:
    """Fixed set of pinned-shape K/V slabs for point-to-point traffic."""

    def __init__(self, count: int, shape, dtype, device):
        self._ready: Deque[torch.Tensor] = deque(
            torch.empty((2, *shape), dtype=dtype, device=device) for _ in range(count)
        )
        self.capacity = count

    def rent(self) -> Optional[torch.Tensor]:
        if not self._ready:
            return None
        return self._ready.popleft()  # clean: handed to the renter

    def rent_or_raise(self, who: str) -> torch.Tensor:
        slab = self.rent()  # clean: near miss, only None is dropped on the raising branch
        if slab is None:
            raise RuntimeError(f"{who}: no comm buffer left ({self.capacity} in total)")
        return slab

    def give(self, slab: torch.Tensor) -> None:
        self._ready.append(slab)

    @property
    def idle(self) -> int:
        return len(self._ready)


@dataclass
class Hop:
    slab: torch.Tensor
    works: List[dist.Work]
    src: int

    def wait(self) -> None:
        for w in self.works:
            w.wait()
        self.works.clear()


class RingComm:
    def __init__(self, group, pool: CommBufferPool):
        self.group = group
        self.pool = pool
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.next = (self.rank + 1) % self.world
        self.prev = (self.rank - 1) % self.world
        self._inflight: List[Hop] = []

    def exchange(self, outgoing: torch.Tensor) -> Hop:
        incoming = self.pool.rent_or_raise("exchange")  # clean: moves into the Hop that is returned
        ops = [
            dist.P2POp(dist.isend, outgoing, self.next, self.group),
            dist.P2POp(dist.irecv, incoming, self.prev, self.group),
        ]
        return Hop(incoming, dist.batch_isend_irecv(ops), self.prev)

    def post(self, outgoing: torch.Tensor) -> None:
        self._inflight.append(self.exchange(outgoing))  # clean: near miss, drain() gives back every posted hop

    def drain(self, consume: Callable[[torch.Tensor], None]) -> int:
        n = 0
        while self._inflight:
            hop = self._inflight.pop()
            hop.wait()
            consume(hop.slab)
            self.pool.give(hop.slab)
            n += 1
        return n

    def barrier_probe(self, payload: torch.Tensor) -> bool:
        """Round-trips one slab; true if the neighbour sent the same step counter."""
        hop = self.exchange(payload)  # leak: only the comparison result survives, the slab is never given back
        hop.wait()
        return bool(torch.equal(hop.slab[0, :1], payload[0, :1]))


def _merge(out, lse, block_out, block_lse):
    new_lse = torch.logaddexp(lse, block_lse)
    out = out * torch.exp(lse - new_lse).unsqueeze(-1) + block_out * torch.exp(block_lse - new_lse).unsqueeze(-1)
    return out, new_lse


def _local(q, k, v, scale):
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    lse = torch.logsumexp(s, dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.exp(s - lse.unsqueeze(-1)), v), lse


def ring_forward(comm: RingComm, q, k, v, scale: float):
    current = comm.pool.rent_or_raise("ring_forward")  # clean: given back when the next hop replaces it or after the loop
    current[0].copy_(k)
    current[1].copy_(v)
    out, lse = _local(q, k, v, scale)
    for _ in range(comm.world - 1):
        hop = comm.exchange(current)  # clean: near miss, its slab becomes current, which is always given back
        hop.wait()
        comm.pool.give(current)
        current = hop.slab
        block_out, block_lse = _local(q, current[0], current[1], scale)
        out, lse = _merge(out, lse, block_out, block_lse)
    comm.pool.give(current)
    return out, lse


def ring_forward_causal(comm: RingComm, q, k, v, scale: float):
    """Shards that lie entirely in the future are passed on without being attended to."""
    first = comm.pool.rent_or_raise("ring_forward_causal")  # leak: current is rebound to the next hop and the first slab is lost
    first[0].copy_(k)
    first[1].copy_(v)
    out, lse = _local(q, k, v, scale)
    current = first
    for step in range(1, comm.world):
        hop = comm.exchange(current)  # leak: each hop but the last is overwritten through current without give
        hop.wait()
        current = hop.slab
        if (comm.rank - step) < 0:
            continue
        block_out, block_lse = _local(q, current[0], current[1], scale)
        out, lse = _merge(out, lse, block_out, block_lse)
    comm.pool.give(current)
    return out, lse


def gather_dilated(comm: RingComm, kv: torch.Tensor, rate: int, sink: List[torch.Tensor]) -> int:
    """LongNet-style gather: only every `rate`-th token of each remote shard is kept."""
    stage = comm.pool.rent()  # clean: near miss, a missing buffer is the only way to skip the give
    if stage is None:
        logger.warning("no staging buffer, falling back to local segment")
        sink.append(kv[..., ::rate, :].clone())
        return 1
    stage.copy_(kv)
    comm.post(stage)  # clean: near miss, drain() on the next line gives every posted slab back
    n = comm.drain(lambda slab: sink.append(slab[..., ::rate, :].clone()))
    comm.pool.give(stage)
    return n


class OverlappedRing:
    """Keeps a prefetched hop so that the send of step i overlaps the compute of i-1."""

    def __init__(self, comm: RingComm, scale: float):
        self.comm = comm
        self.scale = scale
        self._ahead: Optional[Hop] = None

    def prefetch(self, kv: torch.Tensor) -> None:
        if self._ahead is None:
            self._ahead = self.comm.exchange(kv)  # clean: step() or flush() gives the slab back

    def step(self, q, out, lse):
        hop, self._ahead = self._ahead, None
        if hop is None:
            return out, lse
        hop.wait()
        block_out, block_lse = _local(q, hop.slab[0], hop.slab[1], self.scale)
        self.comm.pool.give(hop.slab)
        return _merge(out, lse, block_out, block_lse)

    def restart(self, kv: torch.Tensor) -> None:
        if self._ahead is not None:
            self._ahead.wait()
        self._ahead = self.comm.exchange(kv)  # leak: a prefetched hop is waited for but its slab is not given back

    def flush(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()
            self.comm.pool.give(self._ahead.slab)
            self._ahead = None
