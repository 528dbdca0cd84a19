"""CUDA graph capture by batch size: static input buffers, streams and capture memory pools."""
from __future__ import annotations

import bisect
import logging
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch

log = logging.getLogger(__name__)

_streams: List[Any] = []
_streams_out = 0
MAX_STREAMS = 8


def stream_get(device: str = "cuda") -> Optional[Any]:
    global _streams_out
    if _streams:
        _streams_out += 1
        return _streams.pop()
    if _streams_out >= MAX_STREAMS:
        return None
    _streams_out += 1
    return torch.cuda.Stream(device)


def stream_put(s: Any) -> None:
    global _streams_out
    _streams_out -= 1
    _streams.append(s)


def with_stream(fn: Callable[[Any], Any]) -> Any:
    s = stream_get()  # clean: put in finally
    if s is None:
        return fn(None)
    try:
        return fn(s)
    finally:
        stream_put(s)


def copy_overlapped(dst: torch.Tensor, src: torch.Tensor) -> None:
    s = stream_get()  # leak: not put when the tensors share a device
    if s is None or dst.device == src.device:
        dst.copy_(src)
        return
    with torch.cuda.stream(s):
        dst.copy_(src, non_blocking=True)
    s.synchronize()
    stream_put(s)


@contextmanager
def side_stream(wait: bool = True) -> Iterator[Any]:
    s = stream_get()  # clean: put in finally when there was one
    try:
        if s is not None and wait:
            s.wait_stream(torch.cuda.current_stream())
        yield s
    finally:
        if s is not None:
            stream_put(s)


class StaticBuffers:
    """Input buffers by padded batch size; a buffer belongs to one graph at a time."""

    def __init__(self, sizes: List[int], hidden: int, copies: int = 2):
        self.sizes = sorted(sizes)
        self.hidden = hidden
        self._spare: Dict[int, List[torch.Tensor]] = {
            n: [torch.zeros(n, hidden) for _ in range(copies)] for n in self.sizes
        }

    def pad(self, n: int) -> int:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else -1

    def withdraw(self, n: int) -> Optional[torch.Tensor]:
        shelf = self._spare.get(self.pad(n))
        return shelf.pop() if shelf else None

    def withdraw_dtype(self, n: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        t = self.withdraw(n)  # leak: the pooled buffer is rebound to its converted copy
        if t is not None and t.dtype != dtype:
            t = t.to(dtype)
        return t

    def deposit(self, t: torch.Tensor) -> None:
        self._spare[t.shape[0]].append(t)


class MemoryPools:
    """Capture pool handles with a use count; graphs of near sizes share one."""

    def __init__(self, n: int):
        self.uses = [0] * n

    def join(self) -> int:
        i = min(range(len(self.uses)), key=self.uses.__getitem__)
        self.uses[i] += 1
        return i

    def part(self, i: int) -> None:
        self.uses[i] -= 1


class Captured:
    def __init__(self, size: int, inp: torch.Tensor, pool: int, graph: Any):
        self.size = size
        self.inp = inp
        self.pool = pool
        self.graph = graph


class GraphRunner:
    def __init__(self, bufs: StaticBuffers, pools: MemoryPools, model: Callable[[torch.Tensor], torch.Tensor]):
        self.bufs = bufs
        self.pools = pools
        self.model = model
        self.graphs: Dict[int, Captured] = {}
        self.stack = ExitStack()

    def _record(self, inp: torch.Tensor, pool: int) -> Optional[Any]:
        if not torch.cuda.is_available():
            return None
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=pool):
            self.model(inp)
        return g

    def capture(self, n: int) -> bool:
        size = self.bufs.pad(n)
        if size in self.graphs:
            return True
        inp = self.bufs.withdraw(n)  # clean: near miss, deposited when the capture gives nothing, else in graphs
        if inp is None:
            return False
        pool = self.pools.join()  # leak: the pool is not parted from when the capture gives nothing
        graph = self._record(inp, pool)
        if graph is None:
            self.bufs.deposit(inp)
            return False
        self.graphs[size] = Captured(size, inp, pool, graph)
        return True

    def capture_all(self) -> List[int]:
        failed: List[int] = []
        for size in reversed(self.bufs.sizes):
            if size in self.graphs:
                continue
            inp = self.bufs.withdraw(size)  # clean: deposited before the continue
            if inp is None:
                failed.append(size)
                continue
            pool = self.pools.join()  # clean: parted from before the continue, else in graphs
            graph = self._record(inp, pool)
            if graph is None:
                self.pools.part(pool)
                self.bufs.deposit(inp)
                failed.append(size)
                continue
            self.graphs[size] = Captured(size, inp, pool, graph)
        return failed

    def recapture(self, size: int) -> bool:
        """New weights: record again with the same input buffer."""
        cap = self.graphs[size]
        pool = self.pools.join()  # clean: one of the two pools is parted from either way
        graph = self._record(cap.inp, pool)
        if graph is None:
            self.pools.part(pool)
            return False
        self.pools.part(cap.pool)
        cap.pool, cap.graph = pool, graph
        return True

    def evict(self, size: int) -> None:
        cap = self.graphs.pop(size, None)
        if cap is None:
            return
        self.bufs.deposit(cap.inp)
        self.pools.part(cap.pool)

    def replay(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        cap = self.graphs.get(self.bufs.pad(x.shape[0]))
        if cap is None:
            return self.eager(x)
        cap.inp[: x.shape[0]].copy_(x)
        cap.graph.replay()
        return cap.inp[: x.shape[0]].clone()

    def eager(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        use_static = self.bufs.pad(x.shape[0]) > 0
        inp = self.bufs.withdraw(x.shape[0]) if use_static else x  # clean: near miss, deposited unless it is x itself
        if inp is None:
            inp = x
        if inp is not x:
            inp[: x.shape[0]].copy_(x)
        y = self.model(inp)[: x.shape[0]].clone()
        if inp is not x:
            self.bufs.deposit(inp)
        return y

    def profile(self, n: int, reps: int) -> List[float]:
        times: List[float] = []
        inp = self.bufs.withdraw(n)  # leak: fewer than two repetitions return before the deposit
        if inp is None:
            return times
        if reps < 2:
            log.info("profiling needs two repetitions")
            return times
        for _ in range(reps):
            t0 = torch.cuda.Event(enable_timing=True)
            t1 = torch.cuda.Event(enable_timing=True)
            t0.record()
            self.model(inp)
            t1.record()
            t1.synchronize()
            times.append(t0.elapsed_time(t1))
        self.bufs.deposit(inp)
        return times

    def warm_sizes(self, sizes: List[int]) -> int:
        with ExitStack() as stack:
            warmed = 0
            for n in sizes:
                t = self.bufs.withdraw(n)  # clean: a callback on the stack deposits it
                if t is None:
                    continue
                stack.callback(self.bufs.deposit, t)
                self.model(t)
                warmed += 1
        return warmed

    def hold_streams(self, n: int) -> List[Any]:
        held = []
        for _ in range(n):
            s = stream_get()  # clean: near miss, the runner's stack puts it at close()
            if s is None:
                break
            self.stack.callback(stream_put, s)
            held.append(s)
        return held

    def pipelined(self, xs: List[torch.Tensor]) -> List[torch.Tensor]:
        out: List[torch.Tensor] = []
        for i, x in enumerate(xs):
            s = stream_get()  # leak: an empty chunk goes to the next one before the put
            if s is None:
                out.append(self.model(x))
                continue
            if x.numel() == 0:
                continue
            with torch.cuda.stream(s):
                out.append(self.model(x))
            s.synchronize()
            stream_put(s)
        return out

    def close(self) -> None:
        for size in list(self.graphs):
            self.evict(size)
        self.stack.close()
