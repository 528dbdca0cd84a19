"""Side streams, CUDA graph executables and the little pools around them."""
from __future__ import annotations

import queue
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable

import torch


class StreamRack:
    def __init__(self, n: int, priority: int = 0) -> None:
        self._q: queue.Queue[Any] = queue.Queue()
        for _ in range(n):
            self._q.put(torch.cuda.Stream(priority=priority))

    def grab(self, timeout: float | None = None) -> torch.cuda.Stream:
        return self._q.get(timeout=timeout)  # clean: handed to the caller

    def grab_idle(self) -> torch.cuda.Stream | None:
        """A stream without pending work."""
        for _ in range(self._q.qsize()):
            try:
                s = self._q.get_nowait()  # leak: a stream that is still busy is not put back
            except queue.Empty:
                return None
            if s.query():
                return s
        return None

    def grab_first(self, want: Callable[[Any], bool]) -> torch.cuda.Stream | None:
        for _ in range(self._q.qsize()):
            try:
                s = self._q.get_nowait()  # clean: put at the end of the queue if it is not wanted
            except queue.Empty:
                return None
            if want(s):
                return s
            self._q.put(s)
        return None

    def drop(self, s: torch.cuda.Stream) -> None:
        self._q.put(s)


class OnStream(AbstractContextManager):
    """with OnStream(rack): ... runs the body on a side stream and joins it afterwards."""

    def __init__(self, rack: StreamRack, join: bool = True) -> None:
        self.rack = rack
        self.join = join

    def __enter__(self) -> torch.cuda.Stream:
        self.side = self.rack.grab()  # leak: __exit__ returns before drop when join is off
        self.side.wait_stream(torch.cuda.current_stream())
        return self.side

    def __exit__(self, *exc) -> None:
        if not self.join:
            return
        torch.cuda.current_stream().wait_stream(self.side)
        self.rack.drop(self.side)


class OnStreamPair(AbstractContextManager):
    def __init__(self, rack: StreamRack, two: bool) -> None:
        self.rack = rack
        self.two = two

    def __enter__(self) -> "OnStreamPair":
        self.first = self.rack.grab()  # clean: dropped in __exit__
        self.second = self.rack.grab() if self.two else self.first  # clean: near miss, dropped in __exit__ under the same flag
        return self

    def __exit__(self, *exc) -> None:
        self.rack.drop(self.first)
        if self.two:
            self.rack.drop(self.second)


@dataclass
class GraphExec:
    batch: int
    graph: Any
    inputs: torch.Tensor
    busy: bool = False


class GraphTable:
    """Executables by padded batch size; one replay at a time each."""

    def __init__(self, sizes: list[int], capture: Callable[[int], GraphExec]) -> None:
        self.sizes = sorted(sizes)
        self.table = {s: capture(s) for s in self.sizes}
        self._mu = threading.Lock()

    def book(self, batch: int) -> GraphExec | None:
        with self._mu:
            for s in self.sizes:
                g = self.table[s]
                if s >= batch and not g.busy:
                    g.busy = True
                    return g
        return None

    def unbook(self, g: GraphExec) -> None:
        g.busy = False


class Runner:
    def __init__(self, graphs: GraphTable, rack: StreamRack, eager: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.graphs = graphs
        self.rack = rack
        self.eager = eager
        self.sidecar: torch.cuda.Stream | None = None
        self.owns_sidecar = False

    def run(self, x: torch.Tensor) -> torch.Tensor:
        g = self.graphs.book(x.shape[0])  # clean: unbooked in finally, or None and eager
        if g is None:
            return self.eager(x)
        try:
            g.inputs[:x.shape[0]].copy_(x)
            g.graph.replay()
            return g.inputs[:x.shape[0]].clone()
        finally:
            self.graphs.unbook(g)

    def run_exact(self, x: torch.Tensor) -> torch.Tensor:
        g = self.graphs.book(x.shape[0])  # leak: a padded graph falls back to eager while booked
        if g is None or g.batch != x.shape[0]:
            return self.eager(x)
        g.inputs.copy_(x)
        g.graph.replay()
        out = g.inputs.clone()
        self.graphs.unbook(g)
        return out

    def run_many(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        outs = []
        for x in xs:
            if x.numel() == 0:
                continue
            g = self.graphs.book(x.shape[0])  # clean: near miss, the continue is for None only
            if g is None:
                outs.append(self.eager(x))
                continue
            g.inputs[:x.shape[0]].copy_(x)
            g.graph.replay()
            outs.append(g.inputs[:x.shape[0]].clone())
            self.graphs.unbook(g)
        return outs

    def overlap(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.graphs.book(x.shape[0])  # leak: stays booked when queue.Empty ends the wait for a stream
        if g is None:
            return self.eager(x), self.eager(y)
        try:
            side = self.rack.grab(timeout=0.1)  # clean: dropped in the inner finally
        except queue.Empty:
            return self.eager(x), self.eager(y)
        try:
            with torch.cuda.stream(side):
                right = self.eager(y)
            g.inputs[:x.shape[0]].copy_(x)
            g.graph.replay()
            left = g.inputs[:x.shape[0]].clone()
        finally:
            self.graphs.unbook(g)
            self.rack.drop(side)
        return left, right

    def use_sidecar(self, stream: torch.cuda.Stream | None = None) -> None:
        self.close()
        if stream is None:
            self.sidecar = self.rack.grab()  # clean: near miss, close() drops it when owns_sidecar is set
            self.owns_sidecar = True
        else:
            self.sidecar = stream
            self.owns_sidecar = False

    def close(self) -> None:
        if self.sidecar is not None and self.owns_sidecar:
            self.rack.drop(self.sidecar)
        self.sidecar = None
        self.owns_sidecar = False

    def copy_out(self, x: torch.Tensor, host: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        own = stream is None
        if own:
            stream = self.rack.grab()  # leak: an empty tensor returns before the drop
        if x.numel() == 0:
            return
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        stream.synchronize()
        if own:
            self.rack.drop(stream)

    def copy_in(self, host: torch.Tensor, x: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        own = stream is None
        if own:
            stream = self.rack.grab()  # clean: near miss, dropped in finally under the same flag
        try:
            with torch.cuda.stream(stream):
                x.copy_(host, non_blocking=True)
            stream.synchronize()
        finally:
            if own:
                self.rack.drop(stream)

    def tied_stream(self, owner: Any) -> torch.cuda.Stream:
        s = self.rack.grab()  # clean: near miss, the finalizer of owner drops it
        weakref.finalize(owner, self.rack.drop, s)
        return s

    def warmup(self, batches: list[int], limit: int) -> int:
        ready = 0
        for b in batches:
            g = self.graphs.book(b)  # leak: break at a graph over the limit leaves it booked
            if g is None:
                continue
            if g.batch > limit:
                break
            g.graph.replay()
            self.graphs.unbook(g)
            ready += 1
        return ready
