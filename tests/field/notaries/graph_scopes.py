"""Capture and profiling scopes: streams and events taken on entry, put back on exit."""
from __future__ import annotations

import time
from typing import Protocol

import torch


class Engine(Protocol):
    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> object | None: ...

    def wait(self, event: int) -> None: ...


class HandlePool:
    """Integer handles (streams or events) of one device."""

    def __init__(self, handles: range) -> None:
        self._spare = list(handles)
        self._out: set[int] = set()

    def take(self) -> int:
        handle = self._spare.pop()
        self._out.add(handle)
        return handle

    def put(self, handle: int) -> None:
        self._out.remove(handle)
        self._spare.append(handle)

    def in_use(self) -> int:
        return len(self._out)


class CaptureScope:
    """Captures the body into a graph; an empty body gives no graph."""

    def __init__(self, engine: Engine, streams: HandlePool, events: HandlePool) -> None:
        self.engine = engine
        self.streams = streams
        self.events = events
        self.graph: object | None = None

    def __enter__(self) -> "CaptureScope":
        self.stream = self.streams.take()  # clean: near miss, __exit__ puts it back ahead of its early return
        self.event = self.events.take()  # leak: __exit__ returns early when nothing was captured
        self.engine.begin_capture(self.stream)
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.graph = self.engine.end_capture(self.stream)
        self.streams.put(self.stream)
        if self.graph is None:
            return False
        self.engine.wait(self.event)
        self.events.put(self.event)
        return False


class TimedScope:
    def __init__(self, events: HandlePool, enabled: bool) -> None:
        self.events = events
        self.enabled = enabled
        self.elapsed = 0.0

    def __enter__(self) -> "TimedScope":
        if self.enabled:
            self.start = self.events.take()  # clean: near miss, __exit__ returns early only when not enabled
            self.began = time.perf_counter()
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        if not self.enabled:
            return
        self.elapsed = time.perf_counter() - self.began
        self.events.put(self.start)


class NestedScope:
    """Can be entered again by the same thread; the outermost exit ends it."""

    def __init__(self, streams: HandlePool) -> None:
        self.streams = streams
        self.depth = 0
        self.stream: int | None = None

    def __enter__(self) -> int:
        if self.depth == 0:
            self.stream = self.streams.take()  # clean: near miss, once at depth 0 and put back at depth 0
        self.depth += 1
        return self.stream

    def __exit__(self, *exc_info) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.streams.put(self.stream)
        self.stream = None


class SideStream:
    """Re-entrant as well; every entry runs on a fresh stream."""

    def __init__(self, streams: HandlePool) -> None:
        self.streams = streams
        self.depth = 0
        self.stream = -1

    def __enter__(self) -> int:
        self.depth += 1
        self.stream = self.streams.take()  # leak: inner entries take one each, only the outermost exit puts
        return self.stream

    def __exit__(self, *exc_info) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        self.streams.put(self.stream)


class StepProfiler:
    def __init__(self, streams: HandlePool, events: HandlePool) -> None:
        self.streams = streams
        self.events = events
        self.copy_stream: int | None = None
        self.begin_event: int | None = None
        self.end_event: int | None = None

    def start(self) -> None:
        if self.copy_stream is not None:
            return
        self.copy_stream = self.streams.take()  # clean: near miss, stop() puts it back and resets the guard
        self.begin_event = self.events.take()  # clean: stop() puts it back
        self.end_event = self.events.take()  # leak: stop() sets the field to None without put()

    def step(self, engine: Engine, tensors: list[torch.Tensor]) -> int:
        engine.wait(self.begin_event)
        return sum(t.numel() for t in tensors)

    def stop(self) -> None:
        if self.copy_stream is None:
            return
        self.streams.put(self.copy_stream)
        self.events.put(self.begin_event)
        self.copy_stream = self.begin_event = self.end_event = None


class ProfiledTrainer:
    """Wraps a profiler and a timed scope; shutdown() passes through both."""

    def __init__(self, streams: HandlePool, events: HandlePool, timed: bool) -> None:
        self.profiler = StepProfiler(streams, events)
        self.events = events
        self.timed = timed
        self.marks: list[int] = []

    def mark(self) -> None:
        if self.timed:
            self.marks.append(self.events.take())  # clean: near miss, shutdown() drains whatever is marked

    def shutdown(self) -> None:
        self.profiler.stop()
        while self.marks:
            self.events.put(self.marks.pop())


def capture_all(engine: Engine, streams: HandlePool, events: HandlePool, bodies) -> list[object]:
    graphs = []
    for body in bodies:
        with CaptureScope(engine, streams, events) as scope:  # clean: entered and left by with
            body(scope.stream)
        if scope.graph is not None:
            graphs.append(scope.graph)
    return graphs


def time_bodies(events: HandlePool, bodies, enabled: bool) -> float:
    total = 0.0
    for body in bodies:
        with TimedScope(events, enabled) as scope:  # clean: entered and left by with
            body()
        total += scope.elapsed
    return total
