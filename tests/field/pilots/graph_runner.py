from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class StaticBufferPool:
    def __init__(self, hidden: int, max_tokens: int, count: int):
        self.max_tokens = max_tokens
        self._free = [torch.zeros(max_tokens, hidden, device="cuda") for _ in range(count)]

    def claim(self) -> Tensor:
        if not self._free:
            raise RuntimeError("no static buffer left")
        return self._free.pop()

    def claim_if_any(self) -> Optional[Tensor]:
        return self._free.pop() if self._free else None

    def yield_back(self, buf: Tensor) -> None:
        self._free.append(buf)


class GraphPoolTable:
    def __init__(self, limit: int):
        self.limit = limit
        self._refs: dict[int, int] = {}
        self._handles: dict[int, tuple] = {}

    def join(self, key: int) -> Optional[tuple]:
        if key not in self._handles:
            if len(self._handles) >= self.limit:
                return None
            self._handles[key] = torch.cuda.graph_pool_handle()
            self._refs[key] = 0
        self._refs[key] += 1
        return self._handles[key]

    def leave(self, key: int) -> None:
        self._refs[key] -= 1
        if self._refs[key] == 0:
            del self._refs[key]
            del self._handles[key]


@dataclass
class CapturedGraph:
    size: int
    graph: torch.cuda.CUDAGraph
    inp: Tensor
    out: Tensor
    pool_key: int
    residual: Optional[Tensor] = None


@dataclass
class RunnerStats:
    replays: int = 0
    eager: int = 0
    captured: list[int] = field(default_factory=list)


class GraphRunner:
    def __init__(self, fn: Callable[[Tensor], Tensor], buffers: StaticBufferPool, pools: GraphPoolTable, sizes: list[int]):
        self.fn = fn
        self.buffers = buffers
        self.pools = pools
        self.sizes = sorted(sizes)
        self.graphs: dict[int, CapturedGraph] = {}
        self.stats = RunnerStats()
        self._pad: Optional[Tensor] = None

    def capture(self, size: int) -> bool:
        if size in self.graphs:
            return True
        handle = self.pools.join(size // 64)  # leak: without a static buffer it returns False and never leaves the pool
        if handle is None:
            return False
        inp = self.buffers.claim_if_any()  # clean: near miss, kept by the captured graph which evict() takes apart
        if inp is None:
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            out = self.fn(inp[:size])
        self.graphs[size] = CapturedGraph(size, graph, inp, out, size // 64)
        self.stats.captured.append(size)
        return True

    def capture_with_residual(self, size: int) -> bool:
        key = size // 64
        handle = self.pools.join(key)  # clean: near miss, left again on each failing way
        if handle is None:
            return False
        inp = self.buffers.claim_if_any()  # clean: near miss, goes back when the residual is not to be had
        if inp is None:
            self.pools.leave(key)
            return False
        residual = self.buffers.claim_if_any()  # leak: evict() yields back inp alone, the residual of the graph is forgotten
        if residual is None:
            self.buffers.yield_back(inp)
            self.pools.leave(key)
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            residual[:size].copy_(inp[:size])
            out = self.fn(inp[:size]) + residual[:size]
        if size in self.graphs:
            self.evict(size)
        self.graphs[size] = CapturedGraph(size, graph, inp, out, key, residual)
        return True

    def recapture(self, size: int) -> None:
        old = self.graphs[size]
        buf = self.buffers.claim()  # leak: the old graph's input buffer is replaced and not yielded back
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.fn(buf[:size])
        old.graph, old.inp, old.out = graph, buf, out

    def refresh_input(self, size: int) -> None:
        entry = self.graphs[size]
        fresh = self.buffers.claim()  # clean: near miss, becomes the entry's input, and the stale one is yielded back
        fresh.copy_(entry.inp)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.fn(fresh[:size])
        stale, entry.inp = entry.inp, fresh
        entry.graph, entry.out = graph, out
        self.buffers.yield_back(stale)

    def evict(self, size: int) -> None:
        entry = self.graphs.pop(size)
        entry.graph.reset()
        self.buffers.yield_back(entry.inp)
        self.pools.leave(entry.pool_key)

    def run(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        i = bisect.bisect_left(self.sizes, n)
        if i == len(self.sizes) or self.sizes[i] not in self.graphs:
            self.stats.eager += 1
            return self.fn(x)
        entry = self.graphs[self.sizes[i]]
        entry.inp[:n].copy_(x)
        entry.graph.replay()
        self.stats.replays += 1
        return entry.out[:n].clone()

    def run_padded(self, x: Tensor) -> Tensor:
        if self._pad is None:
            self._pad = self.buffers.claim()  # clean: near miss, claimed once into an empty field that close() returns
        self._pad[: x.shape[0]].copy_(x)
        self._pad[x.shape[0] :].zero_()
        return self.fn(self._pad)[: x.shape[0]]

    def verify(self, x: Tensor, atol: float) -> bool:
        ref = self.buffers.claim()  # leak: the unequal result returns False without yielding back
        ref[: x.shape[0]].copy_(self.fn(x))
        got = self.run(x)
        if not torch.allclose(ref[: x.shape[0]], got, atol=atol):
            logger.warning("graph output differs for %d tokens", x.shape[0])
            return False
        self.buffers.yield_back(ref)
        return True

    def profile(self, size: int, rounds: int) -> list[float]:
        times: list[float] = []
        buf = self.buffers.claim()  # clean: near miss, the break leads to the same yield_back
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(rounds):
            start.record()
            self.fn(buf[:size])
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
            if len(times) > 3 and max(times[-3:]) - min(times[-3:]) < 0.01:
                break
        self.buffers.yield_back(buf)
        return times

    def close(self) -> None:
        for size in list(self.graphs):
            self.evict(size)
        if self._pad is not None:
            self.buffers.yield_back(self._pad)
            self._pad = None
