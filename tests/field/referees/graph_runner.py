"""CUDA graph capture per batch size with pooled streams, events and input arenas."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

logger = logging.getLogger(__name__)


class StreamPool:
    def __init__(self, n: int, priority: int = 0) -> None:
        self._sem = threading.Semaphore(n)
        self._idle = [torch.cuda.Stream(priority=priority) for _ in range(n)]

    def checkout(self, timeout: Optional[float] = None) -> Optional[torch.cuda.Stream]:
        if not self._sem.acquire(timeout=timeout):  # clean: near miss, the permit goes with the stream and checkin releases it
            return None
        return self._idle.pop()

    def checkin(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)
        self._sem.release()


class EventPool:
    def __init__(self) -> None:
        self._idle: list[torch.cuda.Event] = []
        self.live = 0

    def obtain(self) -> torch.cuda.Event:
        self.live += 1
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def recycle(self, event: torch.cuda.Event) -> None:
        self.live -= 1
        self._idle.append(event)


class InputArena:
    def __init__(self, nbytes: int) -> None:
        self.storage = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.holes: list[tuple[int, int]] = [(0, nbytes)]

    def carve(self, nbytes: int) -> Optional[tuple[int, int]]:
        nbytes = (nbytes + 255) // 256 * 256
        for i, (start, size) in enumerate(self.holes):
            if size < nbytes:
                continue
            del self.holes[i]
            if size > nbytes:
                self.holes.append((start + nbytes, size - nbytes))
            return start, nbytes
        return None

    def give_back(self, span: tuple[int, int]) -> None:
        self.holes.append(span)

    def compact(self) -> None:
        merged: list[tuple[int, int]] = []
        for start, size in sorted(self.holes):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self.holes = merged


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    span: tuple[int, int]
    event: torch.cuda.Event
    hits: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)


class GraphRunner:
    def __init__(self, arena: InputArena, streams: StreamPool, events: EventPool, bytes_per_seq: int) -> None:
        self.arena = arena
        self.streams = streams
        self.events = events
        self.bytes_per_seq = bytes_per_seq
        self.graphs: dict[int, Captured] = {}
        self.last_event: Optional[torch.cuda.Event] = None

    def capture(self, batch: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        span = self.arena.carve(batch * self.bytes_per_seq)  # leak: recapturing a batch size overwrites the entry and its old span
        if span is None:
            return False
        stream = self.streams.checkout()  # clean: near miss, checked in by finally on both outcomes
        if stream is None:
            self.arena.give_back(span)
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            view = self.arena.storage[span[0] : span[0] + span[1]]
            with torch.cuda.graph(graph, stream=stream):
                out = fn(view)
        except torch.cuda.OutOfMemoryError:
            logger.warning("capture of batch %d ran out of memory", batch)
            self.arena.give_back(span)
            return False
        finally:
            self.streams.checkin(stream)
        old = self.graphs.get(batch)
        event = old.event if old is not None else self.events.obtain()  # clean: near miss, the old event is reused so nothing is overwritten
        self.graphs[batch] = Captured(graph, span, event, outputs=[out])
        return True

    def drop(self, batch: int) -> None:
        entry = self.graphs.pop(batch, None)
        if entry is None:
            return
        entry.event.synchronize()
        self.arena.give_back(entry.span)
        self.events.recycle(entry.event)

    def replay(self, batch: int, inputs: torch.Tensor) -> Optional[torch.Tensor]:
        stream = self.streams.checkout(timeout=1.0)  # leak: a batch size without a graph returns None with the stream out
        if stream is None:
            return None
        entry = self.graphs.get(batch)
        if entry is None:
            return None
        with torch.cuda.stream(stream):
            self.arena.storage[entry.span[0] : entry.span[0] + inputs.nbytes].copy_(inputs.view(torch.uint8).view(-1))
            entry.graph.replay()
            entry.event.record(stream)
        self.streams.checkin(stream)
        entry.hits += 1
        return entry.outputs[0]

    def mark(self) -> None:
        if self.last_event is not None:
            self.last_event.synchronize()
        self.last_event = self.events.obtain()  # leak: the earlier mark is synchronised and overwritten, never recycled
        self.last_event.record()

    def timed(self, fn: Callable[[], None]) -> float:
        begin, end = self.events.obtain(), self.events.obtain()  # clean: near miss, both are recycled in finally
        try:
            begin.record()
            fn()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)
        finally:
            self.events.recycle(begin)
            self.events.recycle(end)

    def fan_out(self, fns: list[Callable[[], None]]) -> int:
        busy: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []
        for fn in fns:
            stream = self.streams.checkout(timeout=0.0)  # clean: near miss, busy is joined and checked in below
            if stream is None:
                fn()
                continue
            event = self.events.obtain()  # leak: the join loop checks in the stream and forgets the event
            with torch.cuda.stream(stream):
                fn()
                event.record(stream)
            busy.append((stream, event))
        for stream, event in busy:
            torch.cuda.current_stream().wait_event(event)
            self.streams.checkin(stream)
        return len(busy)

    def scratch(self, nbytes: int, fn: Callable[[torch.Tensor], None]) -> bool:
        span = self.arena.carve(nbytes)  # clean: near miss, a failed carve is retried after compact and given back at the end
        if span is None:
            self.arena.compact()
            span = self.arena.carve(nbytes)  # clean: given back at the end
        if span is None:
            return False
        fn(self.arena.storage[span[0] : span[0] + nbytes])
        self.arena.give_back(span)
        return True
