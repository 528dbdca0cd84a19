"""CUDA graph capture with pooled streams, static input buffers and graph memory pools."""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator

import torch

logger = logging.getLogger(__name__)


class StreamPool:
    def __init__(self, size: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(size)]

    def borrow(self) -> torch.cuda.Stream | None:
        if not self._streams:
            return None
        return self._streams.pop()

    def return_(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)


class StaticBuffers:
    """Fixed buffers, by batch size."""

    def __init__(self, sizes: list[int], hidden: int, copies: int) -> None:
        self.sizes = sorted(sizes)
        self._free = {s: [torch.zeros(s, hidden, device="cuda") for _ in range(copies)] for s in sizes}

    def borrow(self, batch: int) -> torch.Tensor | None:
        i = bisect.bisect_left(self.sizes, batch)
        while i < len(self.sizes):
            shelf = self._free[self.sizes[i]]
            if shelf:
                return shelf.pop()
            i += 1
        return None

    def return_(self, buf: torch.Tensor) -> None:
        self._free[buf.shape[0]].append(buf)


class GraphMemPools:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live: dict[int, tuple[int, int]] = {}
        self._n = 0

    def open(self) -> int | None:
        if len(self.live) >= self.limit:
            return None
        self._n += 1
        self.live[self._n] = torch.cuda.graph_pool_handle()
        return self._n

    def close(self, pool_id: int) -> None:
        del self.live[pool_id]


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    inp: torch.Tensor
    out: torch.Tensor
    pool_id: int


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], sizes: list[int], hidden: int) -> None:
        self.model = model
        self.streams = StreamPool(4)
        self.buffers = StaticBuffers(sizes, hidden, copies=2)
        self.mem = GraphMemPools(limit=len(sizes) + 2)
        self.graphs: dict[int, Captured] = {}
        self.side: torch.cuda.Stream | None = None

    @contextmanager
    def on_stream(self) -> Iterator[torch.cuda.Stream | None]:
        s = self.streams.borrow()  # clean: returned in finally
        try:
            if s is not None:
                s.wait_stream(torch.cuda.current_stream())
            yield s
        finally:
            if s is not None:
                self.streams.return_(s)

    def capture(self, batch: int) -> bool:
        inp = self.buffers.borrow(batch)  # leak: kept when no graph pool can be opened
        if inp is None:
            return False
        pool_id = self.mem.open()  # clean: near miss, closed when the capture fails, else in graphs
        if pool_id is None:
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.mem.live[pool_id]):
                out = self.model(inp)
        except RuntimeError as e:
            logger.warning("capture of batch %d failed: %s", batch, e)
            self.mem.close(pool_id)
            self.buffers.return_(inp)
            return False
        self.evict(batch)
        self.graphs[batch] = Captured(graph, inp, out, pool_id)
        return True

    def recapture(self, batch: int) -> None:
        old = self.graphs[batch]
        pool_id = self.mem.open()  # leak: the pool of the old capture is overwritten and not closed
        if pool_id is None:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.mem.live[pool_id]):
            out = self.model(old.inp)
        self.graphs[batch] = Captured(graph, old.inp, out, pool_id)

    def evict(self, batch: int) -> None:
        cap = self.graphs.pop(batch, None)
        if cap is None:
            return
        cap.graph.reset()
        self.mem.close(cap.pool_id)
        self.buffers.return_(cap.inp)

    def warmup(self, batch: int, rounds: int) -> float:
        with self.on_stream() as s:  # clean: the context manager returns it
            if s is None:
                return 0.0
            buf = self.buffers.borrow(batch)  # clean: near miss, returned after the rounds, broken off or not
            if buf is None:
                return 0.0
            total = 0.0
            with torch.cuda.stream(s):
                for _ in range(rounds):
                    y = self.model(buf)
                    if not torch.isfinite(y).all():
                        break
                    total += float(y.abs().max())
            self.buffers.return_(buf)
            return total

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        cap = self.graphs.get(x.shape[0])
        if cap is None:
            return self.eager(x)
        cap.inp[: x.shape[0]].copy_(x)
        cap.graph.replay()
        return cap.out[: x.shape[0]].clone()

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.buffers.borrow(x.shape[0])  # leak: returned only when padding was needed
        if buf is None:
            return self.model(x)
        n = x.shape[0]
        buf[:n].copy_(x)
        out = self.model(buf)[:n].clone()
        if buf.shape[0] != n:
            self.buffers.return_(buf)
        return out

    def overlap(self, x: torch.Tensor, comm: Callable[[torch.Tensor], None]) -> torch.Tensor:
        main = self.streams.borrow()  # leak: with one stream left, it is lost in the fallback
        side = self.streams.borrow()  # clean: returned, or None in the fallback
        if main is None or side is None:
            comm(x)
            return self.model(x)
        with torch.cuda.stream(side):
            comm(x)
        with torch.cuda.stream(main):
            y = self.model(x)
        torch.cuda.synchronize()
        self.streams.return_(side)
        self.streams.return_(main)
        return y

    def attach_side(self) -> torch.cuda.Stream | None:
        if self.side is None:
            self.side = self.streams.borrow()  # clean: near miss, kept in side until detach_side, borrowed only when empty
        return self.side

    def detach_side(self) -> None:
        if self.side is not None:
            self.streams.return_(self.side)
        self.side = None

    def profile(self, batch: int) -> list[float]:
        times: list[float] = []
        held: list[torch.Tensor] = []
        while (buf := self.buffers.borrow(batch)) is not None:  # clean: near miss, all that were borrowed are in held and returned
            held.append(buf)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.model(buf)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        for buf in held:
            self.buffers.return_(buf)
        return times

    def close(self) -> None:
        for batch in list(self.graphs):
            self.evict(batch)
        self.detach_side()
