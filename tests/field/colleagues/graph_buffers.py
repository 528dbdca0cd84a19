"""Static buffers of captured CUDA graphs: a heap by size, returned from callbacks."""
from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Optional

import torch

_tie = itertools.count()

class GraphHeap:
    """Smallest fitting buffer first."""

    def __init__(self, sizes: list[int]) -> None:
        self._heap: list[tuple[int, int, torch.Tensor]] = []
        self._mu = threading.Lock()
        for n in sizes:
            self.shelve(torch.empty(n, device="cuda"))

    def fetch(self, n: int) -> Optional[torch.Tensor]:
        small = []
        found = None
        with self._mu:
            while self._heap:
                item = heapq.heappop(self._heap)  # clean: near miss, too small ones are pushed back
                if item[0] >= n:
                    found = item[2]
                    break
                small.append(item)
            for item in small:
                heapq.heappush(self._heap, item)
        return found

    def fetch_top(self, n: int) -> Optional[torch.Tensor]:
        """Only look at the top of the heap."""
        with self._mu:
            if not self._heap:
                return None
            size, _, buf = heapq.heappop(self._heap)  # leak: too small a top is popped and lost
        if size < n:
            return None
        return buf

    def shelve(self, buf: torch.Tensor) -> None:
        with self._mu:
            heapq.heappush(self._heap, (buf.numel(), next(_tie), buf))

class GraphRunner:
    def __init__(self, heap: GraphHeap, pool: ThreadPoolExecutor) -> None:
        self.heap, self.pool = heap, pool
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.static: dict[int, torch.Tensor] = {}
        self.on_done: list[Callable[[], None]] = []

    def capture(self, bs: int, dim: int, model) -> bool:
        if bs in self.static:
            return True
        buf = self.heap.fetch(bs * dim)  # clean: near miss, a failed capture shelves; drop() shelves the rest
        if buf is None:
            return False
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g):
                model(buf[: bs * dim].view(bs, dim))
        except RuntimeError:
            self.heap.shelve(buf)
            return False
        self.graphs[bs], self.static[bs] = g, buf
        return True

    def recapture(self, bs: int, dim: int, model) -> bool:
        buf = self.heap.fetch(bs * dim)  # leak: replaces static[bs] without shelving the old buffer
        if buf is None:
            return False
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            model(buf[: bs * dim].view(bs, dim))
        self.graphs[bs], self.static[bs] = g, buf
        return True

    def drop(self) -> None:
        for buf in self.static.values():
            self.heap.shelve(buf)
        self.static.clear()
        self.graphs.clear()

    def replay_async(self, x: torch.Tensor) -> Optional[Future]:
        buf = self.heap.fetch(x.numel())  # clean: near miss, done callback shelves it
        if buf is None:
            return None
        buf[: x.numel()].copy_(x.flatten())
        fut = self.pool.submit(self._replay, x.shape[0], buf)
        fut.add_done_callback(lambda _f, b=buf: self.heap.shelve(b))
        return fut

    def replay_if_known(self, x: torch.Tensor) -> Optional[Future]:
        buf = self.heap.fetch(x.numel())  # leak: unknown batch size returns before callback is set
        if buf is None or x.shape[0] not in self.graphs:
            return None
        fut = self.pool.submit(self._replay, x.shape[0], buf)
        fut.add_done_callback(lambda _f, b=buf: self.heap.shelve(b))
        return fut

    def _replay(self, bs: int, buf: torch.Tensor) -> float:
        self.static[bs].copy_(buf[: self.static[bs].numel()])
        self.graphs[bs].replay()
        return self.static[bs].sum().item()

    def later(self, n: int, fill: Callable[[torch.Tensor], None]) -> bool:
        buf = self.heap.fetch(n)  # clean: near miss, queued thunk shelves it in flush()
        if buf is None:
            return False

        def done() -> None:
            fill(buf)
            self.heap.shelve(buf)

        self.on_done.append(done)
        return True

    def flush(self) -> None:
        thunks, self.on_done = self.on_done, []
        for t in thunks:
            t()
    def attach(self, owner: Any, n: int) -> Optional[torch.Tensor]:
        """Buffer for as long as owner lives."""
        buf = self.heap.fetch(n)  # clean: near miss, finalizer on owner shelves it
        if buf is not None:
            weakref.finalize(owner, self.heap.shelve, buf)
        return buf

def padded_copy(heap: GraphHeap, x: torch.Tensor, to: int) -> Optional[torch.Tensor]:
    buf = heap.fetch(to)  # clean: handed to the caller
    if buf is None:
        return None
    buf.zero_()
    buf[: x.numel()].copy_(x.flatten())
    return buf

def padded_mean(heap: GraphHeap, xs: list[torch.Tensor], to: int) -> list[float]:
    means = []
    for x in xs:
        buf = padded_copy(heap, x, to)  # leak: every round but the last is rebound unshelved
        if buf is None:
            return means
        means.append(buf.mean().item())
    if xs:
        heap.shelve(buf)
    return means

def padded_max(heap: GraphHeap, x: torch.Tensor, to: int) -> float:
    buf = padded_copy(heap, x, to)  # clean: shelved unless it was None
    top = x.max() if buf is None else buf.max()
    if buf is not None:
        heap.shelve(buf)
    return float(top)
