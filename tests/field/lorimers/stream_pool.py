"""Side streams and timing events for overlapped copies, shared by all kernels of a device."""
from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from typing import Callable, Deque, Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger(__name__)


class _HostStream:
    _ids = itertools.count()

    def __init__(self) -> None:
        self.sid = next(self._ids)
        self.ops: List[str] = []

    def launch(self, name: str) -> None:
        self.ops.append(name)

    def synchronize(self) -> None:
        self.ops.clear()


class _HostEvent:
    def __init__(self) -> None:
        self.at: Optional[int] = None

    def record(self, stream: _HostStream) -> None:
        self.at = len(stream.ops)

    def query(self) -> bool:
        return self.at is not None


class StreamPool:
    def __init__(self, size: int) -> None:
        self._idle: Deque[_HostStream] = deque(_HostStream() for _ in range(size))
        self.busy = 0

    def checkout(self) -> _HostStream:
        if not self._idle:
            self._idle.append(_HostStream())
        self.busy += 1
        return self._idle.popleft()

    def checkin(self, stream: _HostStream) -> None:
        self.busy -= 1
        self._idle.append(stream)

    @contextlib.contextmanager
    def side(self) -> Iterator[_HostStream]:
        s = self.checkout()  # clean: checked in by the finally
        try:
            yield s
        finally:
            s.synchronize()
            self.checkin(s)


class EventPool:
    def __init__(self, cap: int = 64) -> None:
        self._spare: List[_HostEvent] = []
        self.cap = cap
        self.live = 0

    def get(self) -> Optional[_HostEvent]:
        if self.live >= self.cap:
            return None
        self.live += 1
        return self._spare.pop() if self._spare else _HostEvent()

    def put(self, ev: _HostEvent) -> None:
        self.live -= 1
        ev.at = None
        self._spare.append(ev)


class OverlapGuard:
    """`with OverlapGuard(pool):` body runs on a side stream."""

    def __init__(self, pool: StreamPool, blocking: bool = True) -> None:
        self.pool = pool
        self.blocking = blocking
        self.stream: Optional[_HostStream] = None

    def __enter__(self) -> _HostStream:
        self.stream = self.pool.checkout()  # leak: __exit__ returns before checkin when not blocking
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.blocking:
            return False
        self.stream.synchronize()
        self.pool.checkin(self.stream)
        self.stream = None
        return False


class CaptureGuard:
    def __init__(self, pool: StreamPool, enabled: bool) -> None:
        self.pool = pool
        self.enabled = enabled
        self.stream: Optional[_HostStream] = None

    def __enter__(self) -> Optional[_HostStream]:
        if self.enabled:
            self.stream = self.pool.checkout()  # clean: near miss, __exit__ returns early only when nothing was taken
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.stream is None:
            return False
        self.pool.checkin(self.stream)
        self.stream = None
        return False


class KernelTimer:
    """Pairs of events around a launch; elapsed times are read lazily."""

    def __init__(self, events: EventPool) -> None:
        self.events = events
        self._pending: Deque[Tuple[str, _HostEvent, _HostEvent]] = deque()
        self.samples: Dict[str, List[int]] = {}

    def time(self, name: str, stream: _HostStream, fn: Callable[[], None]) -> None:
        start = self.events.get()  # leak: not put back when the stop event is refused
        if start is None:
            fn()
            return
        stop = self.events.get()  # clean: goes to _pending, put back by flush
        if stop is None:
            fn()
            return
        start.record(stream)
        fn()
        stop.record(stream)
        self._pending.append((name, start, stop))

    def time_once(self, name: str, stream: _HostStream, fn: Callable[[], None]) -> None:
        start = self.events.get()  # clean: near miss, put back in the else branch too
        stop = self.events.get()  # clean: near miss, put back in the else branch too
        if start is not None and stop is not None:
            start.record(stream)
            fn()
            stop.record(stream)
            self.samples.setdefault(name, []).append(stop.at - start.at)
        else:
            fn()
        for ev in (start, stop):
            if ev is not None:
                self.events.put(ev)

    def flush(self) -> None:
        while self._pending:
            name, start, stop = self._pending.popleft()
            self.samples.setdefault(name, []).append(stop.at - start.at)
            self.events.put(start)
            self.events.put(stop)


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self._tickets = itertools.count(1)
        self._inflight: Dict[int, Tuple[_HostStream, Optional[_HostEvent]]] = {}
        self._fences: Dict[int, _HostEvent] = {}
        self._d2h: Optional[_HostStream] = None

    def start(self, nbytes: int) -> int:
        ticket = next(self._tickets)
        s = self.streams.checkout()  # clean: kept in _inflight, checked in by finish
        ev = self.events.get()  # clean: kept in _inflight, put back by finish
        s.launch(f"copy{nbytes}")
        if ev is not None:
            ev.record(s)
        self._inflight[ticket] = (s, ev)
        return ticket

    def finish(self, ticket: int) -> bool:
        entry = self._inflight.pop(ticket, None)
        if entry is None:
            return False
        s, ev = entry
        s.synchronize()
        self.streams.checkin(s)
        if ev is not None:
            self.events.put(ev)
        return True

    def fence(self, layer: int, stream: _HostStream) -> None:
        ev = self.events.get()  # leak: wait_fence pops and forgets it
        if ev is None:
            stream.synchronize()
            return
        ev.record(stream)
        self._fences[layer] = ev

    def wait_fence(self, layer: int) -> bool:
        ev = self._fences.pop(layer, None)
        return ev is None or ev.query()

    def open_d2h(self) -> None:
        if self._d2h is None:
            self._d2h = self.streams.checkout()  # clean: closed by close_d2h

    def close_d2h(self) -> None:
        if self._d2h is not None:
            self.streams.checkin(self._d2h)
            self._d2h = None

    def copy_many(self, sizes: List[int], merge: bool) -> int:
        done = 0
        for n in sizes:
            s = self.streams.checkout()  # leak: break on the merged tail leaves without checkin
            s.launch(f"copy{n}")
            if merge and n == 0:
                break
            s.synchronize()
            self.streams.checkin(s)
            done += 1
        return done

    def warmup(self) -> None:
        with self.streams.side() as s:  # clean: context manager checks it in
            s.launch("warmup")


def main() -> None:
    sp, ep = StreamPool(2), EventPool(3)
    ce, timer = CopyEngine(sp, ep), KernelTimer(ep)
    ce.warmup()
    ce.finish(ce.start(64))
    ce.open_d2h()
    ce.close_d2h()
    with CaptureGuard(sp, False), CaptureGuard(sp, True) as s:
        timer.time("k", s, lambda: s.launch("k"))
        timer.flush()
        timer.time_once("k", s, lambda: s.launch("k"))
    print(sp.busy, ep.live, timer.samples)
    with OverlapGuard(sp, blocking=False) as s:
        ce.fence(0, s)
        ce.wait_fence(0)
        ce.fence(1, s)
        ce.wait_fence(1)
        timer.time("k", s, lambda: None)
    ce.copy_many([1, 0], True)
    print(sp.busy, ep.live)


if __name__ == "__main__":
    main()
