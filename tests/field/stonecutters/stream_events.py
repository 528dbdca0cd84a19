"""Streams and events for overlapping compute with gathers and copies."""
from __future__ import annotations

import functools
import logging
from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class PoolDry(RuntimeError):
    """Raised when a pool has nothing left to give."""


class EventPool:
    _shared: Optional["EventPool"] = None

    def __init__(self, count: int, timing: bool = False):
        self._ready: Deque[torch.cuda.Event] = deque(
            torch.cuda.Event(enable_timing=timing) for _ in range(count)
        )

    @classmethod
    def shared(cls) -> "EventPool":
        if cls._shared is None:
            cls._shared = cls(128)
        return cls._shared

    def check_out(self) -> torch.cuda.Event:
        if not self._ready:
            raise PoolDry("events")
        return self._ready.popleft()

    def check_in(self, event: torch.cuda.Event) -> None:
        self._ready.append(event)

    def recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self.check_out()  # clean: handed to the caller
        event.record(stream)
        return event


class StreamPool:
    """Streams by priority; a stream is borrowed for one operation."""

    def __init__(self, n_high: int, n_low: int, device=None):
        self._by_prio: Dict[int, List[torch.cuda.Stream]] = {
            -1: [torch.cuda.Stream(device, priority=-1) for _ in range(n_high)],
            0: [torch.cuda.Stream(device) for _ in range(n_low)],
        }
        self.events = EventPool(n_high + n_low)

    def borrow(self, prio: int = 0) -> torch.cuda.Stream:
        for p in (prio, 0):
            if self._by_prio[p]:
                return self._by_prio[p].pop()
        raise PoolDry("streams")

    def hand_back(self, stream: torch.cuda.Stream) -> None:
        self._by_prio[-1 if stream.priority < 0 else 0].append(stream)

    def borrow_synced(self, after: torch.cuda.Stream) -> torch.cuda.Stream:
        """A stream that waits for what has been queued on another one."""
        stream = self.borrow()  # leak: recorded() raises PoolDry with the stream out
        event = self.events.recorded(after)  # clean: checked in after the wait is queued
        stream.wait_event(event)
        self.events.check_in(event)
        return stream

    def borrow_after(self, event: torch.cuda.Event) -> Optional[torch.cuda.Stream]:
        try:
            stream = self.borrow(-1)  # clean: handed to the caller
        except PoolDry:
            return None
        stream.wait_event(event)
        return stream


def with_stream(pool_attr: str):
    """Runs a method on a borrowed stream."""

    def deco(fn: Callable):
        @functools.wraps(fn)
        def inner(self, *args, **kwargs):
            pool: StreamPool = getattr(self, pool_attr)
            stream = pool.borrow()  # clean: handed back in finally
            try:
                with torch.cuda.stream(stream):
                    return fn(self, *args, **kwargs)
            finally:
                pool.hand_back(stream)

        return inner

    return deco


class Overlap:
    def __init__(self, streams: StreamPool, events: EventPool):
        self.streams = streams
        self.events = events
        self.waiting: Deque[Tuple[torch.cuda.Event, Callable[[], None]]] = deque()
        self.marks: Dict[str, torch.cuda.Event] = {}
        self.trace: List[Tuple[str, float]] = []

    @with_stream("streams")
    def copy_in(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    def defer(self, fn: Callable[[], None]) -> None:
        event = self.events.recorded(torch.cuda.current_stream())  # clean: near miss, in waiting, checked in by poll()
        self.waiting.append((event, fn))

    def poll(self) -> int:
        ran = 0
        while self.waiting and self.waiting[0][0].query():
            event, fn = self.waiting.popleft()
            self.events.check_in(event)
            fn()
            ran += 1
        return ran

    def mark(self, name: str) -> None:
        self.marks[name] = self.events.recorded(torch.cuda.current_stream())  # leak: a second mark of the same name replaces the event

    def wait_mark(self, name: str, stream: torch.cuda.Stream) -> bool:
        event = self.marks.pop(name, None)
        if event is None:
            return False
        stream.wait_event(event)
        self.events.check_in(event)
        return True

    def timed(self, name: str, fn: Callable[[], bool]) -> Optional[float]:
        start = self.events.check_out()  # clean: checked in on the dry way and in finally
        try:
            stop = self.events.check_out()  # clean: checked in in finally
        except PoolDry:
            self.events.check_in(start)
            return None
        try:
            start.record()
            if not fn():
                return None
            stop.record()
            stop.synchronize()
            ms = start.elapsed_time(stop)
        finally:
            self.events.check_in(start)
            self.events.check_in(stop)
        self.trace.append((name, ms))
        return ms

    def timed_loop(self, names: List[str], fn: Callable[[str], bool]) -> Dict[str, float]:
        times: Dict[str, float] = {}
        for name in names:
            start = self.events.check_out()  # leak: continue for a skipped name comes before the check-in
            start.record()
            if not fn(name):
                continue
            torch.cuda.synchronize()
            times[name] = start.elapsed_time(self._now())
            self.events.check_in(start)
        return times

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return event

    def gather_overlapped(self, parts: List[torch.Tensor], out: torch.Tensor) -> bool:
        try:
            stream = self.streams.borrow(-1)  # clean: handed back at the end
        except PoolDry:
            return False
        with torch.cuda.stream(stream):
            torch.cat(parts, out=out)
        torch.cuda.current_stream().wait_stream(stream)
        self.streams.hand_back(stream)
        return True

    def fan_out(self, jobs: List[Callable[[], None]]) -> int:
        """Runs the jobs on as many streams as there are."""
        used: List[torch.cuda.Stream] = []
        for job in jobs:
            try:
                stream = self.streams.borrow()  # clean: near miss, all in used, handed back below
            except PoolDry:
                break
            used.append(stream)
            with torch.cuda.stream(stream):
                job()
        main = torch.cuda.current_stream()
        for stream in used:
            main.wait_stream(stream)
            self.streams.hand_back(stream)
        return len(used)

    def chain(self, jobs: List[Callable[[], None]]) -> None:
        stream = self.streams.borrow()  # leak: the loop goes on with another stream and loses this one
        for i, job in enumerate(jobs):
            with torch.cuda.stream(stream):
                job()
            if i + 1 < len(jobs):
                event = EventPool.shared().recorded(stream)  # leak: the shared event is never checked in
                follower = self.streams.borrow_after(event)  # leak: the turn after replaces it without handing it back
                if follower is None:
                    break
                stream = follower
        torch.cuda.current_stream().wait_stream(stream)
        self.streams.hand_back(stream)


class PhaseTimer:
    """with PhaseTimer(events, sink, 'optimizer'): ..."""

    def __init__(self, events: EventPool, sink: Dict[str, float], name: str, enabled: bool = True):
        self.events = events
        self.sink = sink
        self.name = name
        self.enabled = enabled
        self.start: Optional[torch.cuda.Event] = None

    def __enter__(self) -> "PhaseTimer":
        if self.enabled:
            self.start = self.events.check_out()  # clean: near miss, __exit__ returns early only when start is None
            self.start.record()
        return self

    def __exit__(self, *exc) -> None:
        if self.start is None:
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        self.sink[self.name] = self.start.elapsed_time(end)
        self.events.check_in(self.start)
        self.start = None


def step_phases(overlap: Overlap, phases: Dict[str, Callable[[], None]], on: bool) -> Dict[str, float]:
    sink: Dict[str, float] = {}
    for name, fn in phases.items():
        with PhaseTimer(overlap.events, sink, name, on):  # clean: the with block checks the event in
            fn()
        overlap.poll()
    return sink
