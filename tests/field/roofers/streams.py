"""Side streams and events for copies that overlap with compute."""
from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

log = logging.getLogger(__name__)


class Stream:
    """Thin wrapper; the binding layer fills in the native handle."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.pending = 0

    def query(self) -> bool:
        return self.pending == 0

    def synchronize(self) -> None:
        self.pending = 0


class Event:
    def __init__(self) -> None:
        self.recorded_on: Optional[Stream] = None

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream

    def done(self) -> bool:
        return self.recorded_on is None or self.recorded_on.query()


class StreamPool:
    def __init__(self) -> None:
        self._idle: dict[int, deque[Stream]] = {}
        self.lent = 0

    def borrow(self, priority: int = 0) -> Stream:
        self.lent += 1
        idle = self._idle.setdefault(priority, deque())
        return idle.popleft() if idle else Stream(priority)

    def give_back(self, stream: Stream) -> None:
        self.lent -= 1
        self._idle.setdefault(stream.priority, deque()).append(stream)


class EventPool:
    def __init__(self) -> None:
        self._spare: list[Event] = []
        self.lent = 0

    def get(self) -> Event:
        self.lent += 1
        return self._spare.pop() if self._spare else Event()

    def recycle(self, ev: Event) -> None:
        ev.recorded_on = None
        self.lent -= 1
        self._spare.append(ev)


@contextmanager
def side_stream(pool: StreamPool, priority: int = 0) -> Iterator[Stream]:
    stream = pool.borrow(priority)  # clean: given back in finally
    try:
        yield stream
    finally:
        stream.synchronize()
        pool.give_back(stream)


class StreamGuard:
    """Like side_stream, but never blocks the host."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Optional[Stream] = None

    def __enter__(self) -> Stream:
        self.stream = self.pool.borrow()  # leak: __exit__ returns early while work is pending
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.stream.query():
            log.debug("stream still busy on exit")
            return False
        self.pool.give_back(self.stream)
        self.stream = None
        return False


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool, copy: Callable[..., None], depth: int = 4) -> None:
        self.streams = streams
        self.events = events
        self.copy = copy
        self.depth = depth
        self._watched: deque[tuple[Event, Callable[[], None]]] = deque()
        self._step_events: dict[int, Event] = {}
        self._marks: list[Optional[Event]] = [None] * depth

    def h2d(self, src, dst, stream: Optional[Stream] = None) -> None:
        s = stream if stream is not None else self.streams.borrow()  # clean: near miss, given back when it was borrowed here
        self.copy(dst, src, s)
        if stream is None:
            s.synchronize()
            self.streams.give_back(s)

    def h2d_many(self, pairs) -> None:
        with side_stream(self.streams, priority=1) as s:  # clean: context manager
            for src, dst in pairs:
                self.h2d(src, dst, s)

    def d2h_async(self, src, dst, then: Callable[[Any], None]) -> None:
        s = self.streams.borrow(priority=-1)  # clean: near miss, the completion callback gives it back
        ev = self.events.get()  # clean: near miss, the completion callback recycles it

        def finish() -> None:
            then(dst)
            self.events.recycle(ev)
            self.streams.give_back(s)

        self.copy(dst, src, s)
        ev.record(s)
        self._watched.append((ev, finish))

    def poll(self) -> int:
        fired = 0
        while self._watched and self._watched[0][0].done():
            _, finish = self._watched.popleft()
            finish()
            fired += 1
        return fired

    def mark_step(self, step: int, stream: Stream) -> None:
        ev = self.events.get()  # leak: the ring overwrites the event of step - depth
        ev.record(stream)
        self._step_events[step % self.depth] = ev

    def close_steps(self) -> None:
        for ev in self._step_events.values():
            self.events.recycle(ev)
        self._step_events.clear()

    def mark(self, i: int, stream: Stream) -> None:
        old = self._marks[i % self.depth]
        if old is not None:
            self.events.recycle(old)
        ev = self.events.get()  # clean: near miss, the occupant of the place was recycled first
        ev.record(stream)
        self._marks[i % self.depth] = ev

    def close_marks(self) -> None:
        for i, ev in enumerate(self._marks):
            if ev is not None:
                self.events.recycle(ev)
                self._marks[i] = None

    def barrier(self, lanes: list[Stream], main: Stream) -> None:
        fences = [self.events.get() for _ in lanes]  # leak: fences of idle lanes are skipped
        for lane, ev in zip(lanes, fences):
            if lane.query():
                continue
            ev.record(lane)
            main.pending += 1
            self.events.recycle(ev)

    def prefetch(self, layers: list) -> Iterator[tuple[Any, Stream]]:
        for layer in layers:
            s = self.streams.borrow()  # leak: first_resident breaks off while the stream is out
            self.copy(layer, None, s)
            yield layer, s
            self.streams.give_back(s)

    def first_resident(self, layers: list, resident: Callable[[Any], bool]) -> Any:
        hit = None
        for layer, s in self.prefetch(layers):
            s.synchronize()
            if resident(layer):
                hit = layer
                break
        return hit

    def launch_with_retry(self, fn: Callable[[Stream], Any], tries: int = 3) -> Any:
        for attempt in range(tries):
            s = self.streams.borrow()  # leak: a failed try goes round without giving it back
            try:
                out = fn(s)
            except RuntimeError as e:
                log.warning("launch %d failed: %s", attempt, e)
                continue
            self.streams.give_back(s)
            return out
        return None

    def launch_once(self, fn: Callable[[Stream], Any]) -> Any:
        s = self.streams.borrow()  # clean: finally covers the caught failure
        try:
            return fn(s)
        except RuntimeError:
            return None
        finally:
            self.streams.give_back(s)
