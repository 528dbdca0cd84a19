"""Side streams and events for overlapping communication with compute."""
from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional

try:
    import torch
except ImportError:
    torch = None


class _HostStream:
    """Stand-in so that the module imports on machines without CUDA."""

    def __init__(self, priority: int = 0):
        self.priority = priority
        self.waits: List[Any] = []

    def wait_event(self, ev: Any) -> None:
        self.waits.append(ev)

    def synchronize(self) -> None:
        self.waits.clear()


class _HostEvent:
    def __init__(self):
        self.recorded_on: Optional[Any] = None

    def record(self, stream: Any) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        return True


def _make_stream(priority: int):
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.Stream(priority=priority)
    return _HostStream(priority)


def _make_event():
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.Event()
    return _HostEvent()


class StreamPool:
    def __init__(self, size: int = 4, priority: int = 0):
        self._lock = threading.Lock()
        self._streams = [_make_stream(priority) for _ in range(size)]
        self._taken = 0

    @property
    def taken(self) -> int:
        return self._taken

    def get_stream(self):
        with self._lock:
            if not self._streams:
                return None
            self._taken += 1
            return self._streams.pop()

    def put_stream(self, stream) -> None:
        with self._lock:
            self._taken -= 1
            self._streams.append(stream)


class EventPool:
    def __init__(self):
        self._idle: List[Any] = []
        self.live = 0

    def lease_event(self):
        self.live += 1
        return self._idle.pop() if self._idle else _make_event()

    def return_event(self, ev) -> None:
        self.live -= 1
        self._idle.append(ev)

    @contextlib.contextmanager
    def scoped(self) -> Iterator[Any]:
        ev = self.lease_event()  # leak: a body that raises skips the return, and Overlap.try_run survives that
        yield ev
        self.return_event(ev)

    def recorded(self, stream):
        ev = self.lease_event()  # clean: handed to the caller
        ev.record(stream)
        return ev


class SideStream:
    """`with SideStream(pool) as s:` runs the body on a side stream."""

    def __init__(self, pool: StreamPool, sync: bool = True):
        self.pool = pool
        self.sync = sync
        self.stream = None

    def __enter__(self):
        self.stream = self.pool.get_stream()  # leak: __exit__ returns early when sync is off
        return self.stream

    def __exit__(self, *exc) -> Optional[bool]:
        if self.stream is None:
            return None
        if not self.sync:
            return None
        self.stream.synchronize()
        self.pool.put_stream(self.stream)
        self.stream = None
        return None


class GuardedStream:
    def __init__(self, pool: StreamPool):
        self.pool = pool
        self.stream = None

    def __enter__(self):
        self.stream = self.pool.get_stream()  # clean: near miss, __exit__ returns early only when there is none
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        stream, self.stream = self.stream, None
        if stream is None:
            return False
        try:
            if exc_type is None:
                stream.synchronize()
        finally:
            self.pool.put_stream(stream)
        return False


class Overlap:
    def __init__(self, streams: StreamPool, events: EventPool):
        self.streams = streams
        self.events = events
        self._pending: Dict[str, Any] = {}
        self._h2d = streams.get_stream()  # clean: held for the object's life, shutdown puts it back
        self.errors = 0

    def shutdown(self) -> None:
        while self._pending:
            self.events.return_event(self._pending.popitem()[1])
        if self._h2d is not None:
            self.streams.put_stream(self._h2d)
            self._h2d = None

    def prefetch(self, key: str, copy: Callable[[Any], None]) -> bool:
        with GuardedStream(self.streams) as s:  # clean: near miss, return inside the with puts it back
            if s is None:
                return False
            copy(s)
            ev = self.events.lease_event()  # clean: near miss, stored after the older event of that key is returned
            ev.record(s)
            old = self._pending.pop(key, None)
            if old is not None:
                self.events.return_event(old)
            self._pending[key] = ev
            return True

    def wait(self, key: str, stream) -> None:
        ev = self._pending.pop(key, None)
        if ev is None:
            return
        stream.wait_event(ev)
        self.events.return_event(ev)

    def launch_detached(self, fn: Callable[[Any], None]) -> bool:
        with SideStream(self.streams, sync=False) as s:  # clean: the fault is in SideStream itself
            if s is None:
                return False
            fn(s)
        return True

    def try_run(self, fn: Callable[[Any], None]) -> bool:
        try:
            with self.events.scoped() as ev:  # clean: the fault is in scoped itself
                fn(ev)
        except RuntimeError:
            self.errors += 1
            return False
        return True

    def barrier(self, names: List[str]) -> int:
        """Make the h2d stream wait for each named stage; returns how many were pending."""
        waited = 0
        for name in names:
            ev = self.events.recorded(self._h2d)  # leak: the continue for a stage that is not pending drops it
            if name not in self._pending:
                continue
            self._h2d.wait_event(ev)
            self.events.return_event(ev)
            waited += 1
        return waited

    def is_idle(self) -> bool:
        return self.events.recorded(self._h2d).query()  # leak: a temporary, nobody returns it

    def run_on(self, fn: Callable[[Any], Any], stream: Optional[Any] = None) -> Any:
        own = stream is None
        if own:
            stream = self.streams.get_stream()  # clean: near miss, the finally puts it back under the same flag
            if stream is None:
                return fn(self._h2d)
        try:
            return fn(stream)
        finally:
            if own:
                self.streams.put_stream(stream)


if __name__ == "__main__":
    ov = Overlap(StreamPool(), EventPool())
    ov.prefetch("a", lambda s: None), ov.prefetch("a", lambda s: None), ov.wait("a", _HostStream())
    print(ov.run_on(lambda s: 1), ov.try_run(lambda e: None))
    ov.shutdown()
    print(ov.streams.taken, ov.events.live)
