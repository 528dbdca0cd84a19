"""Side streams, events and captured graphs of one model runner."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass
class StreamNode:
    stream: torch.cuda.Stream
    next: "StreamNode | None" = None


class StreamPool:
    """Side streams on a singly linked free list."""

    def __init__(self, size: int, device: int) -> None:
        self._head: StreamNode | None = None
        for _ in range(size):
            self._head = StreamNode(torch.cuda.Stream(device), self._head)

    def take(self) -> StreamNode | None:
        node = self._head
        if node is None:
            return None
        self._head = node.next  # clean: the unlinked node goes to the caller
        node.next = None
        return node

    def put(self, node: StreamNode) -> None:
        node.next = self._head
        self._head = node

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[torch.cuda.Stream]:
        """Run the body on a side stream, or on the current one if none is idle."""
        node = self.take()  # clean: near miss, None runs on the current stream, a node is put back in the finally
        if node is None:
            yield torch.cuda.current_stream()
            return
        try:
            with torch.cuda.stream(node.stream):
                yield node.stream
        finally:
            self.put(node)


class EventPool:
    """Reusable events; grows when it is empty."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def get_event(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()  # clean: to the caller
        return torch.cuda.Event(enable_timing=True)

    def recycle(self, event: torch.cuda.Event) -> None:
        self._spare.append(event)


class GraphRunner:
    """Captured decode graphs per batch size, with overlapped copies."""

    def __init__(self, model: Callable, streams: StreamPool, events: EventPool) -> None:
        self.model = model
        self.streams = streams
        self.events = events
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.copies: dict[int, tuple[torch.cuda.Event, torch.Tensor]] = {}
        self.step = 0

    def capture(self, batch_size: int, inputs: torch.Tensor) -> bool:
        """Capture the decode graph of one batch size."""
        node = self.streams.take()  # leak: not put back when the graph was already captured
        if node is None:
            return False
        if batch_size in self.graphs:
            return True
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=node.stream):
            self.outputs[batch_size] = self.model(inputs)
        self.graphs[batch_size] = graph
        self.streams.put(node)
        return True

    def capture_all(self, sizes: list[int], make_inputs: Callable[[int], torch.Tensor]) -> int:
        """Capture from the largest size down, warming up on a side stream."""
        captured = 0
        for size in sorted(sizes, reverse=True):
            inputs = make_inputs(size)
            with self.streams.side_stream():  # clean: scoped, also on the continue
                if size in self.graphs:
                    continue
                self.model(inputs)
            captured += self.capture(size, inputs)
        return captured

    def copy_out(self, batch_size: int, host: torch.Tensor) -> int:
        """Start an asynchronous copy of the logits; returns a ticket."""
        self.step += 1
        event = self.events.get_event()  # clean: near miss, kept under the ticket, wait() or flush() recycles it
        host.copy_(self.outputs[batch_size], non_blocking=True)
        event.record()
        self.copies[self.step] = (event, host)
        return self.step

    def wait(self, ticket: int) -> torch.Tensor:
        event, host = self.copies.pop(ticket)
        event.synchronize()
        self.events.recycle(event)
        return host

    def flush(self) -> None:
        while self.copies:
            _, (event, _) = self.copies.popitem()
            event.synchronize()
            self.events.recycle(event)

    def overlap(self, compute: Callable[[], torch.Tensor], copy: Callable[[], None] | None) -> torch.Tensor:
        """Run compute on the current stream and copy on a side stream."""
        node = self.streams.take() if copy is not None else None  # clean: near miss, node is set only where both checks hold
        if node is not None:
            with torch.cuda.stream(node.stream):
                copy()
        result = compute()
        if node is not None:
            torch.cuda.current_stream().wait_stream(node.stream)
            self.streams.put(node)
        return result

    def time_replay(self, batch_size: int, iters: int = 20) -> float | None:
        """Mean milliseconds per replay."""
        start = self.events.get_event()  # leak: an unknown batch size returns without recycling
        stop = torch.cuda.Event(enable_timing=True)
        graph = self.graphs.get(batch_size)
        if graph is None:
            logger.warning("no graph for batch size %d", batch_size)
            return None
        start.record()
        for _ in range(iters):
            graph.replay()
        stop.record()
        stop.synchronize()
        elapsed = start.elapsed_time(stop)
        self.events.recycle(start)
        return elapsed / iters

    def join_all(self, jobs: list[Callable[[], None]]) -> None:
        """Run the jobs on side streams and wait for all of them."""
        done: torch.cuda.Event | None = None
        for job in jobs:
            with self.streams.side_stream() as stream:  # clean: scoped
                job()
                done = self.events.get_event()  # leak: every turn but the last overwrites the event of the turn before
                done.record(stream)
            torch.cuda.current_stream().wait_event(done)
        if done is not None:
            self.events.recycle(done)

    def prefetch(self, host: torch.Tensor, device: torch.Tensor) -> bool:
        """Copy to the device in the background if a stream is idle."""
        node = self.streams.take()  # leak: the copy's node is a local that nothing puts back
        if node is None:
            return False
        with torch.cuda.stream(node.stream):
            device.copy_(host, non_blocking=True)
        event = self.events.get_event()  # clean: recycled as soon as it was waited on
        event.record(node.stream)
        torch.cuda.current_stream().wait_event(event)
        self.events.recycle(event)
        return True
