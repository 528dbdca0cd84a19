"""Gradient buckets for overlapped all-reduce, with pooled flat buffers and comm tickets."""
from __future__ import annotations

import heapq
import itertools
import threading
from typing import Dict, List, Optional, Protocol, Sequence

import torch


class Work(Protocol):
    def wait(self) -> bool: ...
    def is_completed(self) -> bool: ...


class Backend(Protocol):
    world: int

    def all_reduce(self, flat: torch.Tensor) -> Work: ...


class FlatPool:
    """Flat buffers in a max-heap by size."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self._heap: list[tuple[int, int, torch.Tensor]] = []
        self._tie = itertools.count()

    def pull(self, numel: int) -> torch.Tensor:
        if self._heap:
            size, _, buf = heapq.heappop(self._heap)  # leak: the largest buffer is discarded when it is too small
            if -size >= numel:
                return buf
        return torch.empty(numel, dtype=self.dtype)

    def pull_exact(self, numel: int) -> torch.Tensor:
        aside = []
        found = None
        while self._heap and found is None:
            item = heapq.heappop(self._heap)  # clean: near miss, those of other sizes are pushed back below
            if -item[0] == numel:
                found = item[2]
            else:
                aside.append(item)
        for item in aside:
            heapq.heappush(self._heap, item)
        return found if found is not None else torch.empty(numel, dtype=self.dtype)

    def push_back(self, buf: torch.Tensor) -> None:
        heapq.heappush(self._heap, (-buf.numel(), next(self._tie), buf))


class Tickets:
    """Bounds the collectives in flight."""

    def __init__(self, depth: int):
        self.depth = depth
        self.used = 0
        self._cv = threading.Condition()

    def punch(self) -> int:
        with self._cv:
            while self.used >= self.depth:
                self._cv.wait()
            self.used += 1
            return self.used

    def refund(self) -> None:
        with self._cv:
            self.used -= 1
            self._cv.notify()


class Reducer:
    def __init__(self, backend: Backend, pool: FlatPool, tickets: Tickets):
        self.backend = backend
        self.pool = pool
        self.tickets = tickets
        self.inflight: Dict[int, tuple[Work, torch.Tensor, List[torch.Tensor]]] = {}
        self.residual: Dict[str, torch.Tensor] = {}
        self.closed = False
        self._lock = threading.Lock()

    def flatten(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self.pool.pull_exact(sum(g.numel() for g in grads))  # clean: returned, the caller pushes it back
        at = 0
        for g in grads:
            flat[at : at + g.numel()].copy_(g.flatten())
            at += g.numel()
        return flat

    @staticmethod
    def unflatten(flat: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        at = 0
        for g in grads:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()

    def grad_norm(self, grads: Sequence[torch.Tensor]) -> float:
        return float(self.flatten(grads).norm())  # leak: the flat buffer is reduced to a number and not pushed back

    def clip(self, grads: Sequence[torch.Tensor], limit: float) -> float:
        flat = self.flatten(grads)  # clean: pushed back whether clipped or not
        norm = float(flat.norm())
        if norm > limit:
            flat.mul_(limit / (norm + 1e-6))
            self.unflatten(flat, grads)
        self.pool.push_back(flat)
        return norm

    def launch(self, bucket: int, grads: List[torch.Tensor]) -> None:
        flat = self.flatten(grads)  # leak: a world of one returns before the buffer is recorded
        if self.backend.world == 1:
            return
        self.tickets.punch()  # clean: near miss, harvest() refunds it with the bucket, of which there is one in flight
        if bucket in self.inflight:
            self.harvest(bucket)
        self.inflight[bucket] = (self.backend.all_reduce(flat), flat, grads)

    def harvest(self, bucket: int) -> None:
        work, flat, grads = self.inflight.pop(bucket)
        work.wait()
        flat.div_(self.backend.world)
        self.unflatten(flat, grads)
        self.pool.push_back(flat)
        self.tickets.refund()

    def harvest_all(self) -> None:
        for bucket in sorted(self.inflight):
            self.harvest(bucket)

    def keep_residual(self, name: str, grad: torch.Tensor, sent: torch.Tensor) -> None:
        left = self.pool.pull_exact(grad.numel())  # leak: the residual of the step before is overwritten
        torch.sub(grad.flatten(), sent.flatten(), out=left)
        self.residual[name] = left

    def take_residual(self, name: str, grad: torch.Tensor) -> None:
        left = self.residual.pop(name, None)
        if left is not None:
            grad.add_(left.view_as(grad))
            self.pool.push_back(left)

    def reduce_now(self, grads: List[torch.Tensor]) -> bool:
        self._lock.acquire()  # leak: a closed reducer returns with the lock taken
        if self.closed:
            return False
        flat = self.flatten(grads)  # clean: pushed back after the copy
        self.tickets.punch()  # clean: refunded after the wait
        self.backend.all_reduce(flat).wait()
        self.tickets.refund()
        self.unflatten(flat, grads)
        self.pool.push_back(flat)
        self._lock.release()
        return True

    def broadcast_stats(self, grads: List[torch.Tensor]) -> Optional[float]:
        if not self._lock.acquire(timeout=1.0):  # clean: near miss, nothing is held on False, else finally releases
            return None
        try:
            stats = self.pool.pull_exact(2)  # clean: pushed back in the inner finally
            try:
                stats[0] = sum(float(g.sum()) for g in grads)
                stats[1] = len(grads)
                self.backend.all_reduce(stats).wait()
                return float(stats[0] / stats[1])
            finally:
                self.pool.push_back(stats)
        finally:
            self._lock.release()

    def shutdown(self) -> None:
        self.harvest_all()
        for name in list(self.residual):
            self.pool.push_back(self.residual.pop(name))
        self.closed = True
