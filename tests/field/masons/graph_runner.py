"""CUDA graph capture and replay with pooled streams, events and static inputs."""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

import torch


class StreamPool:
    def __init__(self, n: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(n)]

    def obtain(self) -> Optional[torch.cuda.Stream]:
        return self._streams.pop() if self._streams else None

    def recycle(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)


class EventPool:
    def __init__(self) -> None:
        self._events: List[torch.cuda.Event] = []
        self.out = 0

    def draw(self) -> torch.cuda.Event:
        self.out += 1
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)

    def refund(self, event: torch.cuda.Event) -> None:
        self.out -= 1
        self._events.append(event)


class StaticBuffers:
    def __init__(self, sizes: List[int]) -> None:
        self.sizes = sorted(sizes)
        self._free: Dict[int, List[torch.Tensor]] = {s: [torch.zeros(s)] for s in sizes}

    def rent(self, n: int) -> Optional[torch.Tensor]:
        i = bisect.bisect_left(self.sizes, n)
        if i == len(self.sizes):
            return None
        bucket = self._free[self.sizes[i]]
        return bucket.pop() if bucket else torch.zeros(self.sizes[i])

    def unrent(self, t: torch.Tensor) -> None:
        self._free[t.numel()].append(t)


@dataclass
class Captured:
    graph: "torch.cuda.CUDAGraph"
    static_in: torch.Tensor
    static_out: torch.Tensor


Model = Callable[[torch.Tensor], torch.Tensor]


class GraphRunner:
    def __init__(self, model: Model, buffers: StaticBuffers, streams: StreamPool, events: EventPool) -> None:
        self.model = model
        self.buffers = buffers
        self.streams = streams
        self.events = events
        self.graphs: Dict[int, Captured] = {}
        self.copy_stream: Optional[torch.cuda.Stream] = None
        self.timings: List[Tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def capture(self, n: int) -> bool:
        if n in self.graphs:
            return True
        static_in = self.buffers.rent(n)  # clean: near miss, unrented without a stream, else it belongs to the graph until drop
        if static_in is None:
            return False
        stream = self.streams.obtain()  # leak: the handled capture error returns without recycling the stream
        if stream is None:
            self.buffers.unrent(static_in)
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                out = self.model(static_in)
        except RuntimeError:
            self.buffers.unrent(static_in)
            return False
        self.streams.recycle(stream)
        self.graphs[n] = Captured(graph, static_in, out)
        return True

    def recapture(self, n: int) -> bool:
        static_in = self.buffers.rent(n)  # leak: the old graph's input is overwritten with its entry, not unrented
        if static_in is None:
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(static_in)
        self.graphs[n] = Captured(graph, static_in, out)
        return True

    def drop(self, n: int) -> None:
        captured = self.graphs.pop(n, None)
        if captured is not None:
            captured.graph.reset()
            self.buffers.unrent(captured.static_in)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        captured = self.graphs.get(x.numel())
        if captured is None:
            return self.run_eager(x)
        captured.static_in[:x.numel()].copy_(x)
        captured.graph.replay()
        return captured.static_out.clone()

    def run_eager(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.buffers.rent(x.numel())  # clean: near miss, None goes straight to the model, else the finally unrents
        if buf is None:
            return self.model(x)
        try:
            buf[:x.numel()].copy_(x)
            return self.model(buf)[:x.numel()].clone()
        finally:
            self.buffers.unrent(buf)

    def run_padded(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        buf = self.buffers.rent(x.numel())  # leak: the name is rebound to the result and the rented buffer is lost
        if buf is None:
            return None
        buf[:x.numel()].copy_(x)
        buf = self.model(buf)[:x.numel()].clone()
        return buf

    def timed(self, x: torch.Tensor) -> torch.Tensor:
        start = self.events.draw()  # clean: near miss, goes into timings with its end, collect refunds both
        end = self.events.draw()  # clean: near miss, goes into timings with its start, collect refunds both
        start.record()
        out = self.run(x)
        end.record()
        self.timings.append((start, end))
        return out

    def collect(self) -> List[float]:
        ms: List[float] = []
        for start, end in self.timings:
            end.synchronize()
            ms.append(start.elapsed_time(end))
            self.events.refund(start)
            self.events.refund(end)
        self.timings.clear()
        return ms

    def measure(self, x: torch.Tensor, repeats: int) -> float:
        start = self.events.draw()  # clean: refunded after the loop
        best = float("inf")
        for _ in range(repeats):
            end = self.events.draw()  # leak: the break on a slow round leaves out the refund
            start.record()
            self.run(x)
            end.record()
            end.synchronize()
            took = start.elapsed_time(end)
            if took > 2 * best:
                break
            best = min(best, took)
            self.events.refund(end)
        self.events.refund(start)
        return best

    def copy_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.copy_stream is None:
            self.copy_stream = self.streams.obtain()  # clean: near miss, obtained once, close recycles it
        if self.copy_stream is None:
            return x.cpu()
        with torch.cuda.stream(self.copy_stream):
            out = x.to("cpu", non_blocking=True)
        self.copy_stream.synchronize()
        return out

    def fence(self, wait: bool) -> Optional[torch.cuda.Event]:
        event = self.events.draw()  # clean: near miss, refunded when waited for here, else returned to the caller
        event.record()
        if wait:
            event.synchronize()
            self.events.refund(event)
            return None
        return event

    def overlap(self, xs: List[torch.Tensor]) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        for x in xs:
            outs.append(self.run(x))
            event = self.fence(wait=x.numel() > 4096)  # leak: the event of a small tensor is synchronised and forgotten
            if event is not None:
                event.synchronize()
        return outs

    def close(self) -> None:
        self.collect()
        for n in list(self.graphs):
            self.drop(n)
        if self.copy_stream is not None:
            self.streams.recycle(self.copy_stream)
            self.copy_stream = None
