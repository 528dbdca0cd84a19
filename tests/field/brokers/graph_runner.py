"""CUDA graph runner: static input buffers, side streams and private memory pools per batch size."""
from __future__ import annotations

import bisect
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Callable

import torch

logger = logging.getLogger(__name__)


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle = [torch.cuda.Stream() for _ in range(n)]

    def get_stream(self) -> torch.cuda.Stream:
        if not self._idle:
            self._idle.append(torch.cuda.Stream())
        return self._idle.pop()

    def put_stream(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)


class GraphMemory:
    """Hands out private pool ids; an id must be retired before its memory can be reused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[int] = set()
        self._seq = 0

    def reserve_pool(self) -> int | None:
        if len(self._open) >= self.limit:
            return None
        self._seq += 1
        self._open.add(self._seq)
        return self._seq

    def retire_pool(self, pid: int) -> None:
        self._open.discard(pid)


class StaticInputs:
    def __init__(self, sizes: list[int], hidden: int) -> None:
        self.sizes = sorted(sizes)
        self._bufs: dict[int, list[torch.Tensor]] = {
            s: [torch.zeros(s, hidden, device="cuda") for _ in range(2)] for s in self.sizes
        }

    def lease(self, bs: int) -> torch.Tensor | None:
        i = bisect.bisect_left(self.sizes, bs)
        if i == len(self.sizes) or not self._bufs[self.sizes[i]]:
            return None
        return self._bufs[self.sizes[i]].pop()

    def unlease(self, buf: torch.Tensor) -> None:
        self._bufs[buf.shape[0]].append(buf)


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    pool: int
    inputs: torch.Tensor


class SideStream(AbstractContextManager["SideStream"]):
    def __init__(self, streams: StreamPool, enabled: bool = True) -> None:
        self.streams = streams
        self.enabled = enabled
        self.stream: torch.cuda.Stream | None = None

    def __enter__(self) -> "SideStream":
        if self.enabled:
            self.stream = self.streams.get_stream()  # leak: __exit__ returns early when the body raised
        return self

    def __exit__(
        self, et: type[BaseException] | None, ev: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if et is not None:
            logger.error("capture failed: %s", ev)
            return issubclass(et, torch.cuda.OutOfMemoryError)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.streams.put_stream(self.stream)
            self.stream = None
        return False


class GraphRunner:
    def __init__(
        self, model: Callable[[torch.Tensor], torch.Tensor], mem: GraphMemory, inputs: StaticInputs, streams: StreamPool
    ) -> None:
        self.model = model
        self.mem = mem
        self.inputs = inputs
        self.streams = streams
        self.graphs: dict[int, Captured] = {}
        self.shadow: dict[int, torch.Tensor] = {}

    def capture(self, bs: int) -> bool:
        if bs in self.graphs:
            return True
        pid = self.mem.reserve_pool()  # leak: nothing retires it when no static buffer fits
        if pid is None:
            return False
        buf = self.inputs.lease(bs)  # clean: near miss, unleased on out of memory, else kept in graphs until drop
        if buf is None:
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.model(buf)
        except torch.cuda.OutOfMemoryError:
            self.inputs.unlease(buf)
            self.mem.retire_pool(pid)
            return False
        self.graphs[bs] = Captured(graph, pid, buf)
        return True

    def recapture(self, bs: int) -> bool:
        old = self.graphs.get(bs)
        pid = self.mem.reserve_pool()  # clean: near miss, the old pool is retired before the entry is replaced
        if pid is None:
            return False
        buf = old.inputs if old is not None else self.inputs.lease(bs)  # clean: near miss, reuses the old buffer, a fresh one lands in graphs
        if buf is None:
            self.mem.retire_pool(pid)
            return False
        if old is not None:
            self.mem.retire_pool(old.pool)
        self.graphs[bs] = Captured(torch.cuda.CUDAGraph(), pid, buf)
        return True

    def shadow_inputs(self, bs: int) -> torch.Tensor | None:
        if bs not in self.shadow:
            buf = self.inputs.lease(bs)  # leak: drop_all clears shadow without unleasing
            if buf is None:
                return None
            self.shadow[bs] = buf
        return self.shadow[bs]

    def warm(self, sizes: list[int]) -> int:
        stream = self.streams.get_stream()  # clean: near miss, the break also reaches the put_stream below
        ok = 0
        for bs in sizes:
            with torch.cuda.stream(stream):
                if not self.capture(bs):
                    break
            ok += 1
        self.streams.put_stream(stream)
        return ok

    def replay(self, x: torch.Tensor) -> torch.Tensor | None:
        entry = self.graphs.get(x.shape[0])
        if entry is None:
            return None
        stream = self.streams.get_stream()  # leak: a shape mismatch falls back without returning the stream
        if entry.inputs.shape[1:] != x.shape[1:]:
            return self.model(x)
        with torch.cuda.stream(stream):
            entry.inputs[: x.shape[0]].copy_(x)
            entry.graph.replay()
        self.streams.put_stream(stream)
        return entry.inputs

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.inputs.lease(x.shape[0])  # clean: near miss, falls through to the model with nothing held when None
        if buf is None:
            return self.model(x)
        try:
            buf[: x.shape[0]].copy_(x)
            return self.model(buf)[: x.shape[0]].clone()
        finally:
            self.inputs.unlease(buf)

    def drop(self, bs: int) -> None:
        entry = self.graphs.pop(bs, None)
        if entry is None:
            return
        self.mem.retire_pool(entry.pool)
        self.inputs.unlease(entry.inputs)

    def drop_all(self) -> None:
        for bs in list(self.graphs):
            self.drop(bs)
        self.shadow.clear()


def benchmark(runner: GraphRunner, xs: list[torch.Tensor]) -> float:
    total = 0.0
    for x in xs:
        with SideStream(runner.streams, enabled=x.is_cuda):
            out = runner.replay(x)
            total += float(out.sum()) if out is not None else 0.0
    return total
