"""KV exchange between neighbours, double buffered by segment index."""
from __future__ import annotations
import torch
import torch.distributed as dist
from .segments import SegmentRing
from .ulysses import pack_heads
class KVExchange:
    def __init__(self, ring: SegmentRing, right: int, left: int) -> None:
        self.ring, self.right, self.left = ring, right, left
        self.cur = -1
        self.nxt = -1
        self.halo = -1
        self.flights: list[tuple[int, dist.Work]] = []
    def prime(self, kv: torch.Tensor) -> bool:
        if self.cur < 0:
            self.cur = self.ring.cut()  # clean: near miss, only when empty; finish() mends
        if self.cur < 0:
            return False
        self.ring.row(self.cur)[: kv.numel()].copy_(kv.flatten())
        return True
    def turn(self) -> bool:
        """Receive into a new segment and make it current."""
        if self.cur < 0:
            raise RuntimeError("turn before prime")
        self.nxt = self.ring.cut()  # clean: near miss, becomes cur after the old cur is mended
        if self.nxt < 0:
            return False
        ops = [
            dist.P2POp(dist.isend, self.ring.row(self.cur), self.right),
            dist.P2POp(dist.irecv, self.ring.row(self.nxt), self.left),
        ]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
        self.ring.mend(self.cur)
        self.cur, self.nxt = self.nxt, -1
        return True
    def fetch_halo(self, width: int) -> torch.Tensor | None:
        self.halo = self.ring.cut()  # leak: every call overwrites halo, finish() ignores it
        if self.halo < 0:
            return None
        dist.recv(self.ring.row(self.halo)[:width], self.left)
        return self.ring.row(self.halo)[:width]
    def launch(self, parts: list[torch.Tensor]) -> int:
        idx = self.ring.cut_run(len(parts))  # clean: near miss, each index rides in flights until land()
        for i, p in zip(idx, parts):
            self.ring.row(i)[: p.numel()].copy_(p.flatten())
            self.flights.append((i, dist.isend(self.ring.row(i), self.right)))
        return len(idx)
    def launch_heads(self, x: torch.Tensor, world: int, dry: bool) -> bool:
        i = pack_heads(self.ring, x, world)  # leak: a dry run returns without flight or mend
        if i < 0 or dry:
            return False
        self.flights.append((i, dist.isend(self.ring.row(i), self.right)))
        return True
    def land(self) -> None:
        flights, self.flights = self.flights, []
        for i, w in flights:
            w.wait()
            self.ring.mend(i)
    def finish(self) -> None:
        self.land()
        if self.cur >= 0:
            self.ring.mend(self.cur)
            self.cur = -1
def warm_ring(ring: SegmentRing, n: int) -> int:
    idx = ring.cut_run(n)  # leak: only the first of the run is mended
    if not idx:
        return 0
    ring.mem[idx].zero_()
    ring.mend(idx[0])
    return len(idx)
