"""Capture and replay of CUDA graphs with borrowed side streams and shared memory pools."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Iterator, Optional

import torch

log = logging.getLogger("graph_runner")


class StreamPool:
    def __init__(self, size: int, priority: int = 0) -> None:
        self._idle = [torch.cuda.Stream(priority=priority) for _ in range(size)]
        self.borrowed = 0

    def borrow_stream(self) -> Optional[torch.cuda.Stream]:
        if not self._idle:
            return None
        self.borrowed += 1
        return self._idle.pop()

    def give_back_stream(self, stream: torch.cuda.Stream) -> None:
        self.borrowed -= 1
        self._idle.append(stream)


class GraphMemPools:
    """One memory pool per batch-size class, alive while somebody retains it."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[int, int]] = {}
        self._users: dict[int, int] = {}

    def retain_pool(self, size_class: int) -> tuple[int, int]:
        if size_class not in self._handles:
            self._handles[size_class] = torch.cuda.graph_pool_handle()
        self._users[size_class] = self._users.get(size_class, 0) + 1
        return self._handles[size_class]

    def drop_pool(self, size_class: int) -> None:
        self._users[size_class] -= 1
        if self._users[size_class] == 0:
            del self._users[size_class]
            del self._handles[size_class]


@dataclass
class CapturedGraph:
    batch: int
    size_class: int
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], streams: StreamPool, pools: GraphMemPools) -> None:
        self.model = model
        self.streams = streams
        self.pools = pools
        self.graphs: dict[int, CapturedGraph] = {}
        self.drafts: dict[int, CapturedGraph] = {}
        self.copy_stream: Optional[torch.cuda.Stream] = None
        self.comm_stream: Optional[torch.cuda.Stream] = None

    def _record(self, batch: int, size_class: int, static_input: torch.Tensor, pool: tuple[int, int]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.model(static_input)
        return CapturedGraph(batch, size_class, graph, output)

    def capture(self, batch: int, static_input: torch.Tensor) -> CapturedGraph:
        size_class = 1 << (batch - 1).bit_length()
        existing = self.graphs.get(batch)
        if existing is not None:
            return existing
        pool = self.pools.retain_pool(size_class)  # clean: near miss, the graph carries size_class, evict and clear drop the pool
        captured = self._record(batch, size_class, static_input, pool)
        self.graphs[batch] = captured
        return captured

    def recapture(self, batch: int, static_input: torch.Tensor) -> CapturedGraph:
        size_class = 1 << (batch - 1).bit_length()
        pool = self.pools.retain_pool(size_class)  # leak: the graph replaced in the dict held a pool reference which nobody drops
        captured = self._record(batch, size_class, static_input, pool)
        self.graphs[batch] = captured
        return captured

    def capture_draft(self, batch: int, static_input: torch.Tensor) -> Optional[CapturedGraph]:
        pool = self.pools.retain_pool(batch)  # leak: a capture that runs out of memory returns None with the reference counted
        try:
            captured = self._record(batch, batch, static_input, pool)
        except torch.cuda.OutOfMemoryError:
            log.warning("no memory for draft graph of batch %d", batch)
            return None
        previous = self.drafts.pop(batch, None)
        if previous is not None:
            self.pools.drop_pool(previous.size_class)
        self.drafts[batch] = captured
        return captured

    def try_capture(self, batch: int, static_input: torch.Tensor) -> bool:
        if batch in self.graphs:
            return True
        pool = self.pools.retain_pool(batch)  # clean: near miss, the handler drops it, otherwise graphs holds it
        try:
            self.graphs[batch] = self._record(batch, batch, static_input, pool)
        except torch.cuda.OutOfMemoryError:
            self.pools.drop_pool(batch)
            return False
        return True

    def evict(self, batch: int) -> None:
        captured = self.graphs.pop(batch, None)
        if captured is not None:
            self.pools.drop_pool(captured.size_class)

    def warm_up(self, batches: list[int], make_input: Callable[[int], torch.Tensor]) -> int:
        warmed = 0
        for batch in batches:
            stream = self.streams.borrow_stream()  # leak: the continue for sizes captured already keeps the stream
            if stream is None:
                break
            if batch in self.graphs:
                continue
            with torch.cuda.stream(stream):
                self.model(make_input(batch))
            stream.synchronize()
            self.streams.give_back_stream(stream)
            warmed += 1
        return warmed

    def prefetch_inputs(self, hosts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        stream = self.streams.borrow_stream()  # clean: near miss, finally runs when the generator is closed early too
        if stream is None:
            return
        try:
            for host in hosts:
                with torch.cuda.stream(stream):
                    moved = host.to("cuda", non_blocking=True)
                torch.cuda.current_stream().wait_stream(stream)
                yield moved
        finally:
            self.streams.give_back_stream(stream)

    def stage_outputs(self, outputs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        stream = self.streams.borrow_stream()  # leak: a consumer that stops before the end closes the generator short of give_back_stream
        if stream is None:
            return
        for out in outputs:
            with torch.cuda.stream(stream):
                yield out.to("cpu", non_blocking=True)
        self.streams.give_back_stream(stream)

    def first_finished(self, outputs: list[torch.Tensor], eos: int) -> Optional[int]:
        for i, host in enumerate(self.stage_outputs(outputs)):
            if bool((host == eos).any()):
                return i
        return None

    def open_side_streams(self) -> bool:
        if self.copy_stream is None:
            self.copy_stream = self.streams.borrow_stream()  # clean: near miss, borrowed once, close gives it back
        if self.comm_stream is None:
            self.comm_stream = self.streams.borrow_stream()  # leak: close sets the field to None without giving the stream back
        return self.copy_stream is not None and self.comm_stream is not None

    def timed(self, batch: int) -> Optional[float]:
        stream = self.streams.borrow_stream()  # clean: near miss, given back before the early return for a missing graph
        if stream is None:
            return None
        captured = self.graphs.get(batch)
        if captured is None:
            self.streams.give_back_stream(stream)
            return None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            captured.graph.replay()
            end.record()
        end.synchronize()
        self.streams.give_back_stream(stream)
        return start.elapsed_time(end)

    def close(self) -> None:
        for table in (self.graphs, self.drafts):
            for captured in table.values():
                self.pools.drop_pool(captured.size_class)
            table.clear()
        if self.copy_stream is not None:
            self.streams.give_back_stream(self.copy_stream)
            self.copy_stream = None
        if self.comm_stream is not None:
            self.comm_stream.synchronize()
            self.comm_stream = None
