"""Stream and event management for compute/communication overlap."""
from __future__ import annotations

import collections
import threading
import weakref
from typing import Any, Callable, Optional

import torch


class StreamPool:
    """A few side streams. get_stream() waits while all of them are in use."""

    def __init__(self, n: int, priority: int = 0) -> None:
        self._avail = [torch.cuda.Stream(priority=priority) for _ in range(n)]
        self._cond = threading.Condition()

    def get_stream(self) -> torch.cuda.Stream:
        with self._cond:
            while not self._avail:
                self._cond.wait()
            return self._avail.pop(0)  # clean: handed to the caller

    def try_stream(self) -> Optional[torch.cuda.Stream]:
        with self._cond:
            if not self._avail:
                return None
            return self._avail.pop(0)  # clean: handed to the caller

    def idle_stream(self) -> Optional[torch.cuda.Stream]:
        """A stream with no queued work."""
        with self._cond:
            while self._avail:
                s = self._avail.pop(0)  # leak: busy streams on the way to an idle one are popped and dropped
                if s.query():
                    return s
        return None

    def return_stream(self, s: torch.cuda.Stream) -> None:
        with self._cond:
            self._avail.append(s)
            self._cond.notify()


class EventPool:
    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._free: collections.deque = collections.deque()
        self.created = 0

    def new(self) -> torch.cuda.Event:
        try:
            return self._free.popleft()  # clean: handed to the caller
        except IndexError:
            self.created += 1
            return torch.cuda.Event(enable_timing=self.timing)

    def free(self, *events: torch.cuda.Event) -> None:
        self._free.extend(events)


class on_side_stream:
    """Runs the body on a pooled stream, joined to the current one at exit."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool

    def __enter__(self) -> torch.cuda.Stream:
        self.stream = self.pool.get_stream()  # clean: near miss, the early return of __exit__ still passes its finally
        self.stream.wait_stream(torch.cuda.current_stream())
        self._ctx = torch.cuda.stream(self.stream)
        self._ctx.__enter__()
        return self.stream

    def __exit__(self, et, ev, tb) -> None:
        self._ctx.__exit__(et, ev, tb)
        try:
            if et is not None:
                return
            torch.cuda.current_stream().wait_stream(self.stream)
        finally:
            self.pool.return_stream(self.stream)


class timed:
    """Records the device time of its body into sink[name]."""

    def __init__(self, pool: EventPool, sink: dict[str, float], name: str) -> None:
        self.pool, self.sink, self.name = pool, sink, name

    def __enter__(self) -> "timed":
        self.t0 = self.pool.new()  # leak: __exit__ returns before free when the body raised
        self.t0.record()
        return self

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None:
            self.sink[self.name] = float("nan")
            return False
        t1 = self.pool.new()  # clean: freed with t0
        t1.record()
        t1.synchronize()
        self.sink[self.name] = self.t0.elapsed_time(t1)
        self.pool.free(self.t0, t1)
        return False


class FenceList:
    """Objects that must stay alive until the device has passed a point in a stream."""

    def __init__(self, events: EventPool) -> None:
        self.events = events
        self.fences: collections.deque[tuple[torch.cuda.Event, Any]] = collections.deque()

    def guard(self, obj: Any, stream: torch.cuda.Stream) -> None:
        ev = self.events.new()  # clean: appended to fences, freed by poll or drain
        ev.record(stream)
        self.fences.append((ev, obj))

    def guard_once(self, obj: Any, stream: torch.cuda.Stream) -> bool:
        ev = self.events.new()  # leak: not freed when the object is guarded already
        ev.record(stream)
        if any(o is obj for _, o in self.fences):
            return False
        self.fences.append((ev, obj))
        return True

    def poll(self) -> int:
        n = 0
        while self.fences and self.fences[0][0].query():
            ev, _ = self.fences.popleft()
            self.events.free(ev)
            n += 1
        return n

    def drain(self) -> None:
        while self.fences:
            ev, _ = self.fences.popleft()
            ev.synchronize()
            self.events.free(ev)


class OverlapRunner:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.results: dict[str, tuple[Any, torch.cuda.Event, torch.cuda.Stream]] = {}

    def launch(self, name: str, fn: Callable[[], Any]) -> None:
        if name in self.results:
            self.collect(name)
        s = self.streams.get_stream()  # clean: kept in results until collect, any earlier entry is collected first
        ev = self.events.new()  # clean: kept in results until collect
        with torch.cuda.stream(s):
            out = fn()
            ev.record(s)
        self.results[name] = (out, ev, s)

    def collect(self, name: str) -> Any:
        out, ev, s = self.results.pop(name)
        ev.wait()
        self.events.free(ev)
        self.streams.return_stream(s)
        return out

    def collect_all(self) -> dict[str, Any]:
        return {k: self.collect(k) for k in list(self.results)}

    def race(self, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        """Whichever finishes first on its own stream."""
        sa = self.streams.get_stream()  # clean: returned at the end
        sb = self.streams.try_stream()  # leak: not returned when the first one is done at once
        if sb is None:
            sb_out = None
        else:
            with torch.cuda.stream(sb):
                sb_out = b()
        with torch.cuda.stream(sa):
            out = a()
        if sa.query():
            self.streams.return_stream(sa)
            return out
        if sb is not None:
            if sb.query():
                out = sb_out
            self.streams.return_stream(sb)
        self.streams.return_stream(sa)
        return out


class StreamBound:
    """Stream lent for the lifetime of an owner object, returned by a finalizer."""

    def __init__(self, pool: StreamPool, owner: Any) -> None:
        self.stream = pool.get_stream()  # clean: near miss, weakref.finalize returns it when the owner goes
        self._fin = weakref.finalize(owner, pool.return_stream, self.stream)

    def detach(self) -> None:
        self._fin()


def profile_pairs(pool: EventPool, steps: list[Callable[[], None]]) -> list[float]:
    times: list[float] = []
    begin = pool.new()  # leak: not freed when there are no steps
    if not steps:
        return times
    begin.record()
    for step in steps:
        step()
        end = pool.new()  # clean: near miss, becomes begin and is freed in the next round or after the loop
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        pool.free(begin)
        begin = end
    pool.free(begin)
    return times
