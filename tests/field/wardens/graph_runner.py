from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

logger = logging.getLogger(__name__)


class StreamPool:
    def __init__(self, size: int) -> None:
        self._idle = [torch.cuda.Stream() for _ in range(size)]

    def pop_stream(self) -> Optional[torch.cuda.Stream]:
        return self._idle.pop() if self._idle else None

    def push_stream(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)


@dataclass(eq=False)
class StaticInputs:
    batch: int
    input_ids: torch.Tensor
    positions: torch.Tensor


class StaticInputArena:
    def __init__(self, sizes: list[int], copies: int) -> None:
        self.sizes = sorted(sizes)
        self._free: dict[int, list[StaticInputs]] = {
            s: [
                StaticInputs(s, torch.zeros(s, dtype=torch.long, device="cuda"),
                             torch.zeros(s, dtype=torch.long, device="cuda"))
                for _ in range(copies)
            ]
            for s in self.sizes
        }

    def rent(self, batch: int) -> Optional[StaticInputs]:
        at = bisect.bisect_left(self.sizes, batch)
        for size in self.sizes[at:]:
            if self._free[size]:
                return self._free[size].pop()
        return None

    def unrent(self, inputs: StaticInputs) -> None:
        self._free[inputs.batch].append(inputs)

    def rent_exact(self, batch: int) -> Optional[StaticInputs]:
        inputs = self.rent(batch)  # leak: a larger size than asked is dropped
        if inputs is None or inputs.batch != batch:
            return None
        return inputs


class GraphPoolHandles:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.refs: dict[Any, int] = {}

    def retain(self, handle: Any) -> None:
        self.refs[handle] = self.refs.get(handle, 0) + 1

    def drop(self, handle: Any) -> None:
        self.refs[handle] -= 1
        if not self.refs[handle]:
            del self.refs[handle]


@dataclass(eq=False)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    output: torch.Tensor
    handle: Any


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
                 arena: StaticInputArena, streams: StreamPool, pools: GraphPoolHandles) -> None:
        self.model = model
        self.arena = arena
        self.streams = streams
        self.pools = pools
        self.graphs: dict[int, CapturedGraph] = {}
        self.side: Optional[torch.cuda.Stream] = None
        self.inflight: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []

    def capture(self, batch: int, handle: Any) -> bool:
        if batch in self.graphs:
            return True
        inputs = self.arena.rent_exact(batch)  # clean: near miss, unrented when capture fails, else kept in graphs until evict
        if inputs is None:
            return False
        self.pools.retain(handle)  # leak: a failed capture is handled without drop
        stream = self.streams.pop_stream()  # clean: near miss, pushed back in finally when there was one
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=stream):
                output = self.model(inputs.input_ids, inputs.positions)
        except RuntimeError:
            logger.exception("capture of batch %d failed", batch)
            self.arena.unrent(inputs)
            return False
        finally:
            if stream is not None:
                self.streams.push_stream(stream)
        self.graphs[batch] = CapturedGraph(graph, inputs, output, handle)
        return True

    def recapture(self, batch: int, handle: Any) -> None:
        inputs = self.arena.rent(batch)  # leak: the inputs of the graph captured for this batch before are overwritten
        if inputs is None:
            return
        self.pools.retain(handle)  # clean: near miss, the handle of the older graph is dropped below
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            output = self.model(inputs.input_ids, inputs.positions)
        old = self.graphs.get(batch)
        if old is not None:
            self.pools.drop(old.handle)
        self.graphs[batch] = CapturedGraph(graph, inputs, output, handle)

    def evict(self, batch: int) -> None:
        entry = self.graphs.pop(batch, None)
        if entry is None:
            return
        entry.graph.reset()
        self.arena.unrent(entry.inputs)
        self.pools.drop(entry.handle)

    def run_eager(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Optional[torch.Tensor]:
        inputs = self.arena.rent(input_ids.numel())  # clean: near miss, both returns after the None check pass through finally
        if inputs is None:
            return None
        try:
            n = input_ids.numel()
            inputs.input_ids[:n].copy_(input_ids)
            inputs.positions[:n].copy_(positions)
            if not torch.is_grad_enabled():
                return self.model(inputs.input_ids[:n], inputs.positions[:n]).clone()
            return self.model(inputs.input_ids[:n], inputs.positions[:n])
        finally:
            self.arena.unrent(inputs)

    def run_overlapped(self, fn: Callable[[], None]) -> bool:
        stream = self.streams.pop_stream()  # clean: near miss, goes into inflight and poll or synchronize pushes it back
        if stream is None:
            return False
        with torch.cuda.stream(stream):
            fn()
        event = torch.cuda.Event()
        event.record(stream)
        self.inflight.append((stream, event))
        return True

    def poll(self) -> int:
        still: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []
        for stream, event in self.inflight:
            if event.query():
                self.streams.push_stream(stream)
            else:
                still.append((stream, event))
        self.inflight = still
        return len(still)

    def synchronize(self) -> None:
        for stream, event in self.inflight:
            event.synchronize()
            self.streams.push_stream(stream)
        self.inflight = []

    def side_stream(self, fresh: bool = False) -> Optional[torch.cuda.Stream]:
        if self.side is None or fresh:
            self.side = self.streams.pop_stream()  # leak: with fresh the side stream held already is overwritten
        return self.side

    def copy_between(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        read = self.streams.pop_stream()  # clean: near miss, pushed back when the second stream is refused
        if read is None:
            return False
        write = self.streams.pop_stream()  # leak: a mismatched shape pushes back only read
        if write is None:
            self.streams.push_stream(read)
            return False
        if src.shape != dst.shape:
            self.streams.push_stream(read)
            return False
        with torch.cuda.stream(write):
            write.wait_stream(read)
            dst.copy_(src, non_blocking=True)
        write.synchronize()
        self.streams.push_stream(read)
        self.streams.push_stream(write)
        return True

    def close(self) -> None:
        self.synchronize()
        for batch in list(self.graphs):
            self.evict(batch)
        if self.side is not None:
            self.streams.push_stream(self.side)
            self.side = None
