"""Side streams and timing events for overlap scheduling."""
from __future__ import annotations

import collections
import threading
from typing import Callable, Deque, Dict, List, Optional, Tuple


class FakeStream:
    def __init__(self, ident: int, priority: int = 0):
        self.ident = ident
        self.priority = priority
        self.pending: List[Callable[[], None]] = []

    def submit(self, fn: Callable[[], None]) -> None:
        self.pending.append(fn)

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    def query(self) -> bool:
        return not self.pending


class StreamPool:
    def __init__(self, n: int, high: int = 1):
        self._lock = threading.Lock()
        self._normal: Deque[FakeStream] = collections.deque(FakeStream(i) for i in range(n))
        self._high: Deque[FakeStream] = collections.deque(FakeStream(n + i, -1) for i in range(high))

    def borrow(self, high: bool = False) -> Optional[FakeStream]:
        self._lock.acquire()  # clean: released in finally
        try:
            shelf = self._high if high else self._normal
            return shelf.popleft() if shelf else None
        finally:
            self._lock.release()

    def give_back(self, stream: FakeStream) -> None:
        with self._lock:
            (self._high if stream.priority < 0 else self._normal).append(stream)

    def resize(self, n: int) -> int:
        """Grow the normal shelf to n streams; shrinking is refused."""
        self._lock.acquire()  # leak: refusing to shrink returns with the lock held
        have = len(self._normal)
        if n < have:
            return have
        for i in range(have, n):
            self._normal.append(FakeStream(1000 + i))
        self._lock.release()
        return n


class TimedEvent:
    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: FakeStream) -> None:
        stream.submit(lambda: setattr(self, "recorded", True))


class EventRing:
    def __init__(self, n: int):
        self._events = [TimedEvent() for _ in range(n)]

    def draw(self) -> TimedEvent:
        ev = self._events.pop() if self._events else TimedEvent()
        ev.recorded = False
        return ev

    def retire(self, ev: TimedEvent) -> None:
        self._events.append(ev)


class OverlapExecutor:
    """Runs layer prefetches on side streams; one (stream, event) pair per layer in flight."""

    def __init__(self, streams: StreamPool, ring: EventRing):
        self.streams = streams
        self.ring = ring
        self.inflight: Dict[int, Tuple[FakeStream, TimedEvent]] = {}
        self.main = FakeStream(-1)

    def launch(self, layer: int, fn: Callable[[], None]) -> bool:
        if layer in self.inflight:
            return True
        stream = self.streams.borrow()  # clean: into inflight, wait gives it back
        if stream is None:
            return False
        ev = self.ring.draw()  # clean: into inflight, wait retires it
        stream.submit(fn)
        ev.record(stream)
        self.inflight[layer] = (stream, ev)
        return True

    def wait(self, layer: int) -> None:
        stream, ev = self.inflight.pop(layer)
        stream.synchronize()
        assert ev.recorded
        self.ring.retire(ev)
        self.streams.give_back(stream)

    def launch_best(self, fn: Callable[[], None]) -> bool:
        stream = self.streams.borrow()  # leak: rebound when a high-priority stream turns up
        hi = self.streams.borrow(high=True)  # clean: becomes stream and is given back
        if hi is not None:
            stream = hi
        if stream is None:
            return False
        stream.submit(fn)
        stream.synchronize()
        self.streams.give_back(stream)
        return True

    def measure(self, fn: Callable[[], None]) -> bool:
        begin = self.ring.draw()  # clean: retired in finally
        end = self.ring.draw()  # leak: only begin is retired
        try:
            begin.record(self.main)
            self.main.submit(fn)
            end.record(self.main)
            self.main.synchronize()
            return begin.recorded and end.recorded
        finally:
            self.ring.retire(begin)

    def fan_out(self, fns: List[Callable[[], None]]) -> int:
        taken: List[FakeStream] = []
        for fn in fns:
            stream = self.streams.borrow()  # clean: near miss, break leaves the list to be given back
            if stream is None:
                break
            taken.append(stream)
            stream.submit(fn)
        for stream in taken:
            stream.synchronize()
            self.streams.give_back(stream)
        return len(taken)

    def fan_out_checked(self, fns: List[Callable[[], None]]) -> int:
        taken: List[FakeStream] = []
        for fn in fns:
            stream = self.streams.borrow()  # leak: streams that are still busy are filtered out and never given back
            if stream is None:
                break
            taken.append(stream)
            stream.submit(fn)
        if taken:
            taken[0].synchronize()
        idle = [s for s in taken if s.query()]
        for stream in idle:
            self.streams.give_back(stream)
        return len(idle)

    def shutdown(self) -> None:
        for layer in list(self.inflight):
            self.wait(layer)

    def abandon(self, layer: int) -> None:
        """Prefetched layer turned out to be unnecessary."""
        if layer in self.inflight:
            self.wait(layer)


def overlap_copy(streams: StreamPool, ring: EventRing, fns: List[Callable[[], None]], sync: bool) -> Optional[TimedEvent]:
    """Queue copies; returns the event to wait for, or None when run synchronously. Caller retires it."""
    stream = streams.borrow()  # clean: given back on both ways
    if stream is None:
        return None
    ev = ring.draw()  # leak: not retired on the synchronous way
    for fn in fns:
        stream.submit(fn)
    ev.record(stream)
    stream.synchronize()
    streams.give_back(stream)
    if sync:
        return None
    return ev
