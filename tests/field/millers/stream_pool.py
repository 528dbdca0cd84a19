"""CUDA stream and event pools for overlapping copies, collectives and compute."""
from __future__ import annotations

import functools
import itertools
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

_ids = itertools.count()


class FakeEvent:
    def __init__(self) -> None:
        self.id = next(_ids)
        self.recorded = False

    def record(self, stream: Any) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        pass


class FakeStream:
    def __init__(self, priority: int) -> None:
        self.id = next(_ids)
        self.priority = priority

    def wait_event(self, ev: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _new_event() -> Any:
    return torch.cuda.Event() if torch is not None and torch.cuda.is_available() else FakeEvent()


def _new_stream(priority: int) -> Any:
    return torch.cuda.Stream(priority=priority) if torch is not None and torch.cuda.is_available() else FakeStream(priority)


class EventPool:
    def __init__(self) -> None:
        self._spare: List[Any] = []
        self._lock = threading.Lock()
        self.live = 0

    def obtain(self) -> Any:
        with self._lock:
            self.live += 1
            if self._spare:
                return self._spare.pop()
        return _new_event()

    def recycle(self, ev: Any) -> None:
        with self._lock:
            self.live -= 1
            self._spare.append(ev)


class StreamPool:
    """A bounded number of streams per priority."""

    def __init__(self, per_priority: int) -> None:
        self._cap = per_priority
        self._streams: Dict[int, List[Any]] = {}
        self._made: Dict[int, int] = {}
        self._lock = threading.Lock()

    def get(self, priority: int = 0) -> Optional[Any]:
        with self._lock:
            idle = self._streams.setdefault(priority, [])
            if idle:
                return idle.pop()
            if self._made.get(priority, 0) < self._cap:
                self._made[priority] = self._made.get(priority, 0) + 1
                return _new_stream(priority)
            return None

    def put(self, stream: Any) -> None:
        with self._lock:
            self._streams[stream.priority].append(stream)

    def busy(self) -> int:
        return sum(self._made.values()) - sum(map(len, self._streams.values()))


class Overlap:
    """Side-stream work with its completion events."""

    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self._copies: Dict[str, Tuple[Any, Any]] = {}
        self._last_event: Optional[Any] = None
        self._fence: Optional[Any] = None

    @contextmanager
    def side_stream(self, priority: int = -1) -> Iterator[Optional[Any]]:
        stream = self.streams.get(priority)  # clean: near miss, finally puts it back unless it is None
        try:
            yield stream
        finally:
            if stream is not None:
                stream.synchronize()
                self.streams.put(stream)

    @contextmanager
    def timed(self, sink: Callable[[Any, Any], None]) -> Iterator[None]:
        begin = self.events.obtain()  # clean: recycled in finally
        end = self.events.obtain()  # clean: recycled in finally
        try:
            begin.record(None)
            yield
            end.record(None)
            sink(begin, end)
        finally:
            self.events.recycle(begin)
            self.events.recycle(end)

    def launch_copy(self, name: str, work: Callable[[Any], None]) -> bool:
        if name in self._copies:
            return False
        stream = self.streams.get()  # clean: in _copies with its event, put back by finish_copy; None otherwise
        if stream is None:
            work(None)
            return False
        ev = self.events.obtain()  # clean: in _copies, recycled by finish_copy
        work(stream)
        ev.record(stream)
        self._copies[name] = (stream, ev)
        return True

    def finish_copy(self, name: str) -> None:
        stream, ev = self._copies.pop(name)
        ev.synchronize()
        self.events.recycle(ev)
        self.streams.put(stream)

    def poll(self) -> List[str]:
        done = [n for n, (_, ev) in self._copies.items() if ev.query()]
        for n in done:
            self.finish_copy(n)
        return done

    def mark(self, stream: Any) -> None:
        """Remember how far ``stream`` has come."""
        ev = self.events.obtain()  # leak: the former _last_event is overwritten by each mark
        ev.record(stream)
        self._last_event = ev

    def wait_mark(self, stream: Any) -> None:
        if self._last_event is not None:
            stream.wait_event(self._last_event)
            self.events.recycle(self._last_event)
            self._last_event = None

    def set_fence(self, stream: Any) -> None:
        ev = self.events.obtain()  # clean: near miss, the swapped-out fence is recycled below
        ev.record(stream)
        old, self._fence = self._fence, ev
        if old is not None:
            self.events.recycle(old)

    def clear_fence(self) -> None:
        if self._fence is not None:
            self.events.recycle(self._fence)
            self._fence = None

    def high_priority(self, fn: Callable[[Any], Any]) -> Any:
        stream = self.streams.get(-1)  # leak: for functions that are not graph safe the name is rebound to another stream
        if getattr(fn, "graph_safe", True) is False:
            stream = self.streams.get(0)  # clean: put back below, None otherwise
        if stream is None:
            return fn(None)
        result = fn(stream)
        self.streams.put(stream)
        return result

    def fork(self, fns: List[Callable[[Any], Any]]) -> List[Any]:
        """Run each function on its own stream; all streams go back together."""
        results = []
        with ExitStack() as stack:
            for fn in fns:
                stream = self.streams.get()  # clean: near miss, the ExitStack callback puts it back
                if stream is None:
                    results.append(fn(None))
                    continue
                stack.callback(self.streams.put, stream)
                results.append(fn(stream))
        return results

    def fork_all(self, fns: List[Callable[[Any], Any]]) -> Optional[List[Any]]:
        taken: List[Any] = []
        for _ in fns:
            stream = self.streams.get()  # leak: the ones in taken are dropped when the pool runs dry
            if stream is None:
                return None
            taken.append(stream)
        results = [fn(s) for fn, s in zip(fns, taken)]
        for s in taken:
            self.streams.put(s)
        return results


def on_side_stream(overlap: Overlap, priority: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def deco(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kw: Any) -> Any:
            stream = overlap.streams.get(priority)  # leak: an inner None result returns before the put
            if stream is None:
                return fn(*args, **kw)
            out = fn(*args, stream=stream, **kw)
            if out is None:
                return None
            overlap.streams.put(stream)
            return out

        return call

    return deco


def with_event(events: EventPool, fn: Callable[[Any], Any], notify: Optional[Callable[[Any], None]] = None) -> Any:
    """``notify`` gets the event for good and recycles it itself."""
    ev = events.obtain()  # clean: near miss, notify takes it over or it is recycled here
    ev.record(None)
    out = fn(ev)
    if notify is not None:
        notify(ev)
        return out
    events.recycle(ev)
    return out


def main() -> None:
    ov = Overlap(StreamPool(2), EventPool())
    with ov.side_stream() as s:  # clean: context manager
        assert s is not None
    with ov.timed(lambda a, b: None):  # clean: context manager
        pass
    ov.launch_copy("kv", lambda s: None)
    ov.poll()
    ov.fork([lambda s: 1] * 3)
    ov.set_fence(None)
    ov.set_fence(None)
    ov.clear_fence()
    with_event(ov.events, lambda e: 1)
    assert ov.streams.busy() == 0 and ov.events.live == 0
    ov.mark(None)
    ov.mark(None)
    ov.fork_all([lambda s: 1] * 3)
    print(ov.streams.busy(), ov.events.live)


if __name__ == "__main__":
    main()
