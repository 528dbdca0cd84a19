"""The layer: route, dispatch, run the experts, combine."""
from __future__ import annotations

import logging
from typing import Optional

import torch
import torch.distributed as dist

from .buffers import Duplex, TokenBuffers
from .experts import Placement

log = logging.getLogger(__name__)


class MoELayer(torch.nn.Module):
    def __init__(self, experts: torch.nn.ModuleList, router: torch.nn.Linear, place: Placement, bufs: TokenBuffers,
                 capacity: int, overlap: bool = False):
        super().__init__()
        self.experts = experts
        self.router = router
        self.place = place
        self.bufs = bufs
        self.capacity = capacity
        self.overlap = overlap
        self.flight: Optional[tuple[Duplex, dist.Work]] = None

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).argmax(dim=-1)

    def _fill(self, x: torch.Tensor, choice: torch.Tensor, out: torch.Tensor) -> int:
        dropped = 0
        out.zero_()
        for e in range(len(self.experts)):
            rows = (choice == e).nonzero().flatten()
            dropped += max(0, rows.numel() - self.capacity)
            rows = rows[:self.capacity]
            out[e * self.capacity:e * self.capacity + rows.numel()] = x[rows]
        return dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = self.bufs.duplex(self.capacity * len(self.experts))  # clean: ended in finally
        if d is None:
            raise MemoryError("dispatch buffers")
        try:
            self._fill(x, self._route(x), d.send)
            dist.all_to_all_single(d.recv, d.send, group=self.place.group)
            for e, expert in enumerate(self.experts):
                lo = e * self.capacity
                d.send[lo:lo + self.capacity] = expert(d.recv[lo:lo + self.capacity])
            dist.all_to_all_single(d.recv, d.send, group=self.place.group)
            return d.recv[:x.shape[0]].clone()
        finally:
            self.bufs.end_duplex(d)

    def begin(self, x: torch.Tensor) -> bool:
        """Start the dispatch of the next micro-batch; end() completes it."""
        if self.flight is not None:
            return False
        d = self.bufs.duplex(self.capacity * len(self.experts))  # clean: kept in self.flight, end() gives it back
        if d is None:
            return False
        self._fill(x, self._route(x), d.send)
        work = dist.all_to_all_single(d.recv, d.send, group=self.place.group, async_op=True)
        self.flight = (d, work)
        return True

    def end(self) -> Optional[torch.Tensor]:
        if self.flight is None:
            return None
        (d, work), self.flight = self.flight, None
        work.wait()
        out = d.recv.clone()
        self.bufs.end_duplex(d)
        return out

    def dropped_tokens(self, x: torch.Tensor) -> int:
        t = self.bufs.check_out(self.capacity * len(self.experts))  # leak: not checked in when nothing was dropped
        if t is None:
            return -1
        n = self._fill(x, self._route(x), t)
        if n == 0:
            return 0
        log.info("%d tokens over capacity", n)
        self.bufs.check_in(t)
        return n

    def _combine(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(tensor, borrowed)"""
        t = self.bufs.check_out(x.shape[0]) if self.overlap else None  # clean: returned with the borrowed flag set
        if t is None:
            return x.clone(), False
        t.copy_(x)
        return t, True

    def shared_expert(self, x: torch.Tensor, expert: torch.nn.Module) -> torch.Tensor:
        t, borrowed = self._combine(x)  # clean: near miss, checked in under the borrowed flag
        out = expert(t)
        if borrowed:
            self.bufs.check_in(t)
        return out

    def shared_norm(self, x: torch.Tensor) -> float:
        t, borrowed = self._combine(x)  # leak: in the overlap mode with gradients on it is not checked in
        out = float(t.norm())
        if borrowed and not torch.is_grad_enabled():
            self.bufs.check_in(t)
        return out

    def load_stats(self, batches: list[torch.Tensor]) -> list[float]:
        stats = []
        for x in batches:
            d = self.bufs.duplex(len(self.experts))  # leak: empty batches continue without end_duplex()
            if d is None:
                break
            if x.numel() == 0:
                stats.append(0.0)
                continue
            counts = torch.bincount(self._route(x).flatten(), minlength=len(self.experts))
            d.send.copy_(counts.unsqueeze(-1).expand_as(d.send))
            dist.all_to_all_single(d.recv, d.send, group=self.place.group)
            stats.append(float(d.recv[:, 0].max()))
            self.bufs.end_duplex(d)
        return stats
