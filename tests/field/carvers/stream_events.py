"""Side-stream and event pools used by the copy engine."""
from __future__ import annotations

import contextlib
import logging
import threading
from typing import Callable, Dict, Iterator, List, Optional, Tuple

log = logging.getLogger("copy_engine")


class Stream:
    def __init__(self, index: int) -> None:
        self.index = index
        self.pending: List[Callable[[], None]] = []

    def enqueue(self, fn: Callable[[], None]) -> None:
        self.pending.append(fn)

    def synchronize(self) -> None:
        work, self.pending = self.pending, []
        for fn in work:
            fn()


class Event:
    def __init__(self) -> None:
        self.stream: Optional[Stream] = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream is None or not self.stream.pending


class StreamPool:
    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._streams = [Stream(i) for i in range(size)]

    def get_stream(self) -> Stream:
        with self._lock:
            if not self._streams:
                raise RuntimeError("stream pool is empty")
            return self._streams.pop()

    def put_stream(self, stream: Stream) -> None:
        with self._lock:
            self._streams.append(stream)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Stream]:
        stream = self.get_stream()  # clean: put back in finally
        try:
            yield stream
        finally:
            stream.synchronize()
            self.put_stream(stream)

    @contextlib.contextmanager
    def borrowed_nowait(self) -> Iterator[Optional[Stream]]:
        stream = self.get_stream()  # leak: put back only when no work is pending
        try:
            yield stream
        finally:
            if not stream.pending:
                self.put_stream(stream)


class EventPool:
    def __init__(self) -> None:
        self._events: List[Event] = []
        self.live = 0

    def acquire_event(self) -> Event:
        self.live += 1
        return self._events.pop() if self._events else Event()

    def release_event(self, event: Event) -> None:
        self.live -= 1
        event.stream = None
        self._events.append(event)


class SideStream:
    """with SideStream(pool) as s: ..."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Optional[Stream] = None

    def __enter__(self) -> Stream:
        self.stream = self.pool.get_stream()  # leak: __exit__ returns before put_stream when the body raised
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            log.error("side stream work failed: %s", exc)
            return True
        self.stream.synchronize()
        self.pool.put_stream(self.stream)
        return False


class OrderedStream:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.stream: Optional[Stream] = None

    def __enter__(self) -> Stream:
        self.stream = self.pool.get_stream()  # clean: near miss, __exit__ puts it back before it looks at the exception
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        stream, self.stream = self.stream, None
        stream.synchronize()
        self.pool.put_stream(stream)
        if exc_type is None:
            return False
        log.warning("ordered stream body raised %s", exc_type.__name__)
        return issubclass(exc_type, TimeoutError)


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.inflight: Dict[int, Tuple[Stream, Event]] = {}
        self._ticket = 0

    def submit(self, fn: Callable[[], None]) -> int:
        stream = self.streams.get_stream()  # clean: kept in inflight until reap
        event = self.events.acquire_event()  # clean: kept in inflight until reap
        stream.enqueue(fn)
        event.record(stream)
        self._ticket += 1
        self.inflight[self._ticket] = (stream, event)
        return self._ticket

    def reap(self, ticket: int) -> None:
        stream, event = self.inflight.pop(ticket)
        stream.synchronize()
        self.events.release_event(event)
        self.streams.put_stream(stream)

    def reap_all(self) -> None:
        for ticket in list(self.inflight):
            self.reap(ticket)

    def fence(self, stream: Stream) -> bool:
        event = self.events.acquire_event()  # leak: the early return for an idle stream skips release_event
        event.record(stream)
        if event.query():
            return True
        stream.synchronize()
        self.events.release_event(event)
        return False

    def fence_all(self, streams: List[Stream]) -> int:
        busy = 0
        event = self.events.acquire_event()  # clean: near miss, continue stays inside the loop and the event is released after it
        for stream in streams:
            event.record(stream)
            if event.query():
                continue
            busy += 1
            stream.synchronize()
        self.events.release_event(event)
        return busy

    def run_guarded(self, fn: Callable[[], None]) -> bool:
        stream = self.streams.get_stream()  # leak: a failing kernel is caught and the stream is not put back
        try:
            stream.enqueue(fn)
            stream.synchronize()
            self.streams.put_stream(stream)
        except RuntimeError as e:
            log.warning("kernel failed: %s", e)
            return False
        return True

    def run_timed(self, fn: Callable[[], None], timed: bool) -> bool:
        start = self.events.acquire_event() if timed else None  # clean: near miss, same flag guards the release
        with self.streams.borrowed() as stream:  # clean: context manager
            if timed:
                start.record(stream)
            stream.enqueue(fn)
        if timed:
            self.events.release_event(start)
        return timed

    def prefetch(self, fns: List[Callable[[], None]]) -> int:
        count = 0
        with OrderedStream(self.streams) as stream:  # clean: context manager
            for fn in fns:
                stream.enqueue(fn)
                count += 1
        return count

    def marks(self, stream: Stream, names: List[str]) -> Dict[str, bool]:
        result: Dict[str, bool] = {}
        for name in names:
            mark = self.events.acquire_event()  # leak: rebound by each pass, only the last is released
            mark.record(stream)
            result[name] = mark.query()
        if names:
            self.events.release_event(mark)
        return result
